// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// oneOf returns a usage error for a flag with another value than these.
func oneOf(flag, value string, values ...string) error {
	if slices.Contains(values, value) {
		return nil
	}
	return usageError{fmt.Errorf("%s: %q is none of %s", flag, value, strings.Join(values, ", "))}
}

// encode writes v for programs, as json or yaml. Both have the names of v's JSON.
func encode(io streams, format string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err == nil && format == "yaml" {
		text, err = yaml.JSONToYAML(text)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(io.out, "%s\n", strings.TrimSuffix(string(text), "\n"))
	return err
}
