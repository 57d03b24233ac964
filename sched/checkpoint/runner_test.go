// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const patience = 5 * time.Minute

// program does what the operation says: it notes its start, answers, refuses, hangs or ends.
const program = `#!/bin/sh
echo $$ >> "$DIR/starts"
while read -r line; do
	case $line in
	*hang*) read -r never <"$DIR/nobody" ;;
	*die*) echo "it is too much" >&2; exit 3 ;;
	*'"state"'*) echo '{"pid":'$(echo "$line" | sed 's/.*"pid"://; s/}.*//')',"state":-1,"step":"'$STEP'","code":1,"error":"no"}' ;;
	*refuse*) echo '{"pid":1,"state":1,"step":"lock","code":801,"error":"no"}' ;;
	*) echo '{"pid":1,"state":2,"took":[{"name":"lock","ns":5}]}' ;;
	esac
done
`

func newRunner(t *testing.T) (*Runner, func() []string) {
	t.Helper()
	dir := t.TempDir()
	r := &Runner{Program: filepath.Join(dir, "program"), Env: []string{"DIR=" + dir}}
	if err := errors.Join(os.WriteFile(r.Program, []byte(program), 0o755), syscall.Mkfifo(filepath.Join(dir, "nobody"), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, h := range r.ready {
			h.end()
		}
	})
	return r, func() []string {
		text, _ := os.ReadFile(filepath.Join(dir, "starts"))
		return strings.Fields(string(text))
	}
}

func (r *Runner) try(op string) (Result, error) {
	return r.run(context.Background(), Request{Op: op, PID: 1})
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func (r *Runner) isReady() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.ready) > 0
}

// A program that was expected does all operations that come one after the other.
func TestOneProgramForAll(t *testing.T) {
	r, starts := newRunner(t)
	r.Expect(1)
	until(t, "it is ready", r.isReady)
	for range 3 {
		res, err := r.try("off")
		if err != nil || res.State != Checkpointed || len(res.Took) != 2 || res.Took[0].Name != "start" || res.Took[1] != (Part{"lock", 5}) {
			t.Fatalf("%+v, %v", res, err)
		}
	}
	if got := starts(); len(got) != 1 {
		t.Errorf("programs %v", got)
	}
}

// A program that has ended meanwhile is replaced, and nobody notices.
func TestProgramEndsMeanwhile(t *testing.T) {
	r, starts := newRunner(t)
	r.Expect(1)
	until(t, "it has begun", func() bool { return len(starts()) == 1 })
	until(t, "it is ready", r.isReady)
	pid, _ := strconv.Atoi(starts()[0])
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(t, "it has ended", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.ready[0].dead()
	})
	if _, err := r.try("off"); err != nil {
		t.Fatal(err)
	}
	if got := starts(); len(got) != 2 {
		t.Errorf("programs %v", got)
	}
}

// After an operation that failed, was ended or not answered, the next one has a new program.
func TestFailureEndsTheProgram(t *testing.T) {
	r, starts := newRunner(t)
	r.Expect(1)
	until(t, "it is ready", r.isReady)
	var e *Error
	if res, err := r.try("refuse"); !errors.As(err, &e) || e.Code != 801 || res.State != Locked {
		t.Errorf("%+v, %v", res, err)
	}
	if _, err := r.try("die"); err == nil || !strings.Contains(err.Error(), "exit status 3: it is too much") {
		t.Error(err)
	}
	r.Limit = 100 * time.Millisecond
	if _, err := r.try("hang"); !errors.As(err, &e) || !e.Timeout {
		t.Error(err)
	}
	r.Limit = 0
	if _, err := r.try("on"); err != nil {
		t.Error(err)
	}
	if got := starts(); len(got) < 3 || len(got) > 4 { // the one that was to hang may not have begun
		t.Errorf("programs %v", got)
	}
}

// Check tells a driver that does not know the process from one that is not there.
func TestCheck(t *testing.T) {
	r, _ := newRunner(t)
	for step, works := range map[string]bool{"state": true, "init": false, "find": false} {
		r.Env = append(r.Env, "STEP="+step)
		if err := r.Check(context.Background()); (err == nil) != works {
			t.Errorf("%s fails: %v", step, err)
		}
	}
	if err := (&Runner{}).Check(context.Background()); !errors.Is(err, ErrNone) {
		t.Error(err)
	}
}

// Nobody expects anything: each program ends with its operation.
func TestNothingExpected(t *testing.T) {
	r, starts := newRunner(t)
	for range 2 {
		if _, err := r.try("on"); err != nil {
			t.Fatal(err)
		}
	}
	if got := starts(); len(got) != 2 || r.isReady() {
		t.Errorf("programs %v, and one is ready: %t", got, r.isReady())
	}
	if _, err := (&Runner{}).State(context.Background(), 1); !errors.Is(err, ErrNone) {
		t.Error(err)
	}
}
