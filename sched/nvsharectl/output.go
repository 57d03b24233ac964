// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"sigs.k8s.io/yaml"
)

// checkOutput returns a usage error for another form of output than these.
func checkOutput(form string, forms ...string) error {
	if slices.Contains(forms, form) {
		return nil
	}
	return usageError{fmt.Errorf("--output: %q is none of %s", form, strings.Join(forms, ", "))}
}

// safely escapes what json.Marshal leaves as it is and terminals obey: the control characters
// from U+007F to U+009F, which names of processes and containers may have. JSON has them in
// strings only, and yaml refuses them.
func safely(text []byte, err error) ([]byte, error) {
	var out []byte
	for _, r := range string(text) {
		if r >= 0x7f && r <= 0x9f {
			out = fmt.Appendf(out, `\u%04x`, r)
		} else {
			out = utf8.AppendRune(out, r)
		}
	}
	return out, err
}

// encode writes v for programs, as json or yaml. Both have the names of v's JSON.
func encode(io streams, format string, v any) error {
	text, err := safely(json.MarshalIndent(v, "", "  "))
	if err == nil && format == "yaml" {
		text, err = yaml.JSONToYAML(text)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(io.out, "%s\n", strings.TrimSuffix(string(text), "\n"))
	return err
}
