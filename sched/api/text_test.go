// SPDX-License-Identifier: Apache-2.0

package api

import (
	"slices"
	"testing"
	"time"
)

func TestParseDuration(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"45": 45 * time.Second, "0.5": 500 * time.Millisecond, "200ms": 200 * time.Millisecond,
		"1m30s": 90 * time.Second, "1": time.Second, "1e-3": time.Millisecond,
	} {
		if got, err := ParseDuration(in); got != want || err != nil {
			t.Errorf("%q: %v, %v, want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "0", "-1", "-5ms", "0s", "abc", "10x", "NaN", "Inf", "-Inf", "1e30", "1e-12", " 1"} {
		if got, err := ParseDuration(in); err == nil {
			t.Errorf("%q: read as %v, want an error", in, got)
		}
	}
}

// A tenant is found by the name that it is shown by.
func TestNamesOf(t *testing.T) {
	for _, c := range []*Container{{Id: "4f0c2b", Name: "main", Namespace: "ml", Pod: "train"}, {Id: "4f0c2b", Name: "main"}, {Id: "4f0c2b91a55e7d"}} {
		if names := NamesOf(c); !slices.Contains(names, Tenant(c, 0)) {
			t.Errorf("%v is shown as %q, which is none of %q", c, Tenant(c, 0), names)
		}
	}
}

// A container's name goes before the beginning of another's id, and a whole id before all.
func TestMeant(t *testing.T) {
	all := map[string]*Container{}
	for id, name := range map[string]string{"aa06": "b", "0f00": "a", "0f01": "main", "bb": "main", "c1": "", "c12": ""} {
		all[id] = &Container{Id: id, Name: name}
	}
	for want, tc := range map[string]struct {
		ids   []string
		named bool
	}{
		"a": {[]string{"0f00"}, true}, "aa": {[]string{"aa06"}, false}, "main": {[]string{"0f01", "bb"}, true}, "0": {[]string{"0f00", "0f01"}, false},
		"c1": {[]string{"c1"}, true}, "c": {[]string{"c1", "c12"}, false}, "container c12": {[]string{"c12"}, true}, "nobody": {nil, false},
	} {
		if ids, named := Meant(want, all); !slices.Equal(ids, tc.ids) || named != tc.named {
			t.Errorf("%q: %v, %v, want %v, %v", want, ids, named, tc.ids, tc.named)
		}
	}
}

func TestParseAntiThrash(t *testing.T) {
	for _, in := range []string{"on", "off", "auto"} {
		m, err := ParseAntiThrash(in)
		if err != nil || AntiThrash(m) != in {
			t.Errorf("%q: %v, %v", in, m, err)
		}
	}
	for _, in := range []string{"", "ON", "1", "AUTO"} {
		if _, err := ParseAntiThrash(in); err == nil {
			t.Errorf("%q: accepted", in)
		}
	}
}
