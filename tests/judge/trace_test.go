// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"errors"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// The C side writes, the Go side reads: the layouts agree.
func TestLogOfTheCSide(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler")
	}
	bin := filepath.Join(t.TempDir(), "log")
	if out, err := exec.Command(cc, "-I../simgpu", "-o", bin, "testdata/log.c").CombinedOutput(); err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	b, err := exec.Command(bin).Output()
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseLog(b, 0)
	if err != nil {
		t.Fatal(err)
	}
	p := Process{Tenant: "ml-a", PID: 7, ID: "2.3"}
	want := Trace{
		Lost:  1,
		Lives: []Life{{p, 100, 900}},
		Intervals: []Interval{
			{UUID(1), p, Kernel, 200, 210, 260, 50, 1},
			{UUID(1), p, HtoD, 300, 310, 390, 60, 3},
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}

	// Since a time: a record that was lost before is none that anybody misses.
	if got, err = ParseLog(b, 261); err != nil {
		t.Fatal(err)
	}
	want.Lost, want.Intervals = 0, want.Intervals[1:]
	if !reflect.DeepEqual(got, want) {
		t.Errorf("since 261 got  %+v\nwant %+v", got, want)
	}
}

func TestNotALog(t *testing.T) {
	header := func(capacity byte) []byte {
		b := make([]byte, logHeader)
		copy(b, "SMGUSLG1")
		b[8] = capacity
		return b
	}
	for name, b := range map[string][]byte{
		"empty":      nil,
		"short":      make([]byte, logHeader-1),
		"no magic":   make([]byte, logHeader+recordSize),
		"no records": header(0),
		"cut off":    append(header(2), make([]byte, recordSize)...),
	} {
		if _, err := ParseLog(b, 0); !errors.Is(err, ErrLog) {
			t.Errorf("%s: error %v, want ErrLog", name, err)
		}
	}
	if _, err := ParseLog(append(header(1), make([]byte, recordSize)...), 0); err != nil {
		t.Errorf("an empty log: %v", err)
	}
}

func TestRecords(t *testing.T) {
	const good = `{"uuid":"GPU-1","tenant":"a","pid":5,"start_ns":10,"end_ns":30}`
	got, err := ParseRecords(strings.NewReader(good+"\n"+good[:20]), "f")
	if err != nil {
		t.Fatal(err)
	}
	want := []Interval{{"GPU-1", Process{"a", 5, "pid 5"}, Kernel, 10, 10, 30, 20, 1}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	for _, bad := range []string{"{\n", `{"tenant":"a","start_ns":1,"end_ns":2}` + "\n",
		`{"uuid":"GPU-1","start_ns":3,"end_ns":2}` + "\n"} {
		if _, err := ParseRecords(strings.NewReader(bad), "f"); err == nil || !strings.HasPrefix(err.Error(), "f:1:") {
			t.Errorf("%q: error %v, want one that names f:1", bad, err)
		}
	}
}
