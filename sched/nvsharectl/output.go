// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/nvshare/nvshare/sched/api"
)

// form is the flag --output: one of some forms, the first of which is the default.
type form struct {
	value *string
	forms []string
}

func (f form) String() string { return *f.value }
func (f form) Type() string   { return strings.Join(f.forms, "|") }
func (f form) Set(s string) error {
	if !slices.Contains(f.forms, s) {
		return fmt.Errorf("it is none of %s", strings.Join(f.forms, ", "))
	}
	*f.value = s
	return nil
}

// addForm gives a command the flag; about is said of it besides its forms.
func addForm(cmd *cobra.Command, value *string, about string, forms ...string) {
	*value = forms[0]
	cmd.Flags().VarP(form{value, forms}, "output", "o", about)
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

// durationFlag is a flag: a number of seconds, or with a unit, as every duration of
// nvsharectl.
type durationFlag time.Duration

func (d *durationFlag) String() string { return time.Duration(*d).String() }
func (d *durationFlag) Type() string   { return "time" }
func (d *durationFlag) Set(s string) error {
	v, err := api.ParseDuration(s)
	if err == nil {
		*d = durationFlag(v)
	}
	return err
}
