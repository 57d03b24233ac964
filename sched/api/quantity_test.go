// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"
	"testing"
)

func TestParseMemory(t *testing.T) {
	for in, want := range map[string]uint64{
		"8Gi": 8 << 30, "4096Mi": 4 << 30, "4G": 4e9, "1.5Gi": 3 << 29, "512M": 512e6, "1Ti": 1 << 40,
		"1048576Ki": 1 << 30, "2000000k": 2e9, "4e9": 4e9, "4E9": 4e9, "4e+9": 4e9, "1Pi": 1 << 50,
		"4096": 4 << 30, "1": 1 << 20, "0.5Gi": 1 << 29, "1.5": 3 << 19, "0008Gi": 8 << 30,
	} {
		if got, err := ParseMemory(in); err != nil || got != want {
			t.Errorf("%q is %d, %v; want %d", in, got, err, want)
		}
		if got, err := ParseMemory(FormatMemory(want)); err != nil || got != want {
			t.Errorf("%d is written %q and read %d, %v", want, FormatMemory(want), got, err)
		}
	}
	for in, want := range map[string]string{
		"": "8Gi", "all": "8Gi", "8GB": "a quantity", "8GiB": "a quantity", "8 Gi": "a quantity", "-8Gi": "a quantity", "+8Gi": "a quantity",
		"8gi": "a quantity", "8m": "a quantity", "8K": "a quantity", "0x10": "a quantity", "8Gi\n": "a quantity", ".5Gi": "a quantity", "5.": "a quantity",
		"8Gi,4Gi": "a quantity", "1e999999999": "a quantity", "1e-5": "a quantity", "NaN": "a quantity", "Inf": "a quantity", "８Gi": "a quantity",
		"0": "less than 1Mi", "0Gi": "less than 1Mi", "8k": "less than 1Mi", "0.1": "less than 1Mi", "1e3": "less than 1Mi",
		"2Pi": "more than 1Pi", "1e99": "more than 1Pi", "16E": "more than 1Pi", "999999999999999999": "more than 1Pi", "999999999999999999Ei": "more than 1Pi",
		strings.Repeat("9", 200<<10): "a quantity",
	} {
		if got, err := ParseMemory(in); err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 300 {
			t.Errorf("%.70q: %d, %v; want %q", in, got, err, want)
		}
	}
}

// What somebody almost wrote is asked for, and that is a quantity.
func TestMemoryMeant(t *testing.T) {
	for in, want := range map[string]string{
		"8GB": "8G", "8GiB": "8Gi", "8 Gi": "8Gi", "8g": "8G", "8gib": "8Gi", "1.5TB": "1.5T", "512mb": "512M", "512 MB": "512M", "4096000KB": "4096000k", "4096000kib": "4096000Ki",
	} {
		_, err := ParseMemory(in)
		if err == nil || !strings.Contains(err.Error(), "(did you mean "+want+"?)") {
			t.Errorf("%q: %v", in, err)
		}
		if _, err := ParseMemory(want); err != nil {
			t.Error(err)
		}
	}
	for _, in := range []string{"8", "lots", "8PB", "GB", "-8GB", "8GBs"} {
		if _, err := ParseMemory(in); err != nil && strings.Contains(err.Error(), "did you mean") {
			t.Error(err)
		}
	}
}

// A number for GiB where MiB are meant is no limit, but a mistake; with a unit it is meant.
func TestParseMemoryLimit(t *testing.T) {
	for in, want := range map[string]uint64{"256": 256 << 20, "4096": 4 << 30, "64Mi": 64 << 20, "8Gi": 8 << 30} {
		if got, err := ParseMemoryLimit(in); err != nil || got != want {
			t.Errorf("%q is %d, %v; want %d", in, got, err, want)
		}
	}
	for in, want := range map[string]string{"8": `"8" without a unit is 8 MiB, too little for any CUDA program (did you mean 8Gi?)`, "1.5": "did you mean 1.5Gi?", "255": "did you mean 255Gi?", "0": "less than 1Mi", "x": "a quantity"} {
		if got, err := ParseMemoryLimit(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is %d, %v; want %q", in, got, err, want)
		}
	}
}

func TestFormatMemory(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "none", 8 << 30: "8Gi", 4096 << 20: "4Gi", 4e9: "4G", 3 << 29: "1536Mi", 1<<30 + 1: "1073741825 bytes",
		1<<64 - 1: "1Pi", // no limit is, but nothing breaks
	} {
		if got := FormatMemory(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}

func FuzzParseMemory(f *testing.F) {
	for _, s := range []string{"8Gi", "4096", "1e99", "1.5G", "", "-1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseMemory(s)
		if err != nil {
			return
		}
		if n < MinMemory || n > MaxMemory {
			t.Errorf("%q is %d", s, n)
		}
		if again, err := ParseMemory(FormatMemory(n)); n%(1<<20) == 0 && (err != nil || again != n) {
			t.Errorf("%q is %d, written %q, read %d, %v", s, n, FormatMemory(n), again, err)
		}
	})
}
