// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// shells are how each one starts without its user's settings, and reads what nvsharectl
// install puts below share for it. The prompt is not what is typed: a terminal shows both.
var shells = []struct {
	name  string
	argv  []string
	setup string
	needs string // a file of the machine
}{
	{"bash", []string{"bash", "--norc", "--noprofile", "-i"}, `PS1=REA'DY> '; . /usr/share/bash-completion/bash_completion; . $SHARE/bash-completion/completions/nvsharectl`,
		"/usr/share/bash-completion/bash_completion"},
	{"zsh", []string{"zsh", "-f", "-i"}, `fpath=($SHARE/zsh/site-functions $fpath); autoload -U compinit; compinit -u -D; PS1=REA'DY> '`, ""},
	{"fish", []string{"fish", "--no-config", "-i"}, `source $SHARE/fish/vendor_completions.d/nvsharectl.fish; function fish_prompt; echo -n REA'DY> '; end`, ""},
}

// In each shell the tab key completes commands, values and the names of live tenants, so that
// the command gets what was meant as one word.
func TestCompletionInShells(t *testing.T) {
	b := newBed(t)
	b.must(t, b.Tenant("cuda-busy", "--seconds", "600"))
	b.awaitTenants(t, 1)
	tenant := fmt.Sprint("user ", os.Getuid())
	share := filepath.Join(b.Dir, "share")
	_, err := b.Ctl(t.Context(), "pages", share)
	b.must(t, err)
	for _, s := range shells {
		t.Run(s.name, func(t *testing.T) {
			if _, err := exec.LookPath(s.argv[0]); err != nil {
				t.Skipf("LEFT OUT: there is no %s here", s.name)
			}
			if _, err := os.Stat(s.needs); s.needs != "" && err != nil {
				t.Skipf("LEFT OUT: %v", err)
			}
			// nvsharectl, but for completion, writes down its arguments.
			dir := t.TempDir()
			got := filepath.Join(dir, "got")
			b.must(t, errors.Join(os.Mkdir(filepath.Join(dir, "bin"), 0o755), os.WriteFile(got, nil, 0o644), os.WriteFile(filepath.Join(dir, "bin/nvsharectl"),
				[]byte("#!/bin/sh\ncase $1 in __complete*) exec "+b.Dir+"/nvsharectl \"$@\" ;; esac\nprintf '[%s]' \"$@\" >>"+got+"\necho >>"+got+"\n"), 0o755)))
			cmd := exec.Command(s.argv[0], s.argv[1:]...)
			cmd.Env = append(b.Env, "PATH="+dir+"/bin:"+os.Getenv("PATH"), "TERM=dumb", "HOME="+dir, "XDG_CONFIG_HOME="+dir, "XDG_DATA_HOME="+dir, "SHARE="+share)
			x := openTerminal(t, cmd, 24, 200)
			// Keys that come before the shell reads them one by one would not reach it as keys.
			b.must(t, b.Await(t.Context(), func() error {
				if x.text() == "" {
					return errors.New("no prompt")
				}
				return nil
			}))
			x.press(t, s.setup+"\r")
			prompts := 0
			for _, c := range []struct{ typed, want string }{
				{"stat", "[status]"},
				{"why us", "[why][" + tenant + "]"},
				{"events --type out", "[events][--type][out-of-memory]"},
				{"set --priority la", "[set][--priority][latency]"},
			} {
				prompts++
				b.must(t, b.Await(t.Context(), func() error {
					if strings.Count(x.text(), "READY> ") < prompts {
						return fmt.Errorf("the terminal: %q", x.text())
					}
					return nil
				}))
				x.press(t, "nvsharectl "+c.typed+"\t\r")
				var said []byte
				if err := b.Await(t.Context(), func() (err error) {
					if said, err = os.ReadFile(got); err == nil && strings.Count(string(said), "\n") < prompts {
						err = fmt.Errorf("the command does not run; the terminal: %q", x.text())
					}
					return err
				}); err != nil {
					t.Fatalf("%q: %v", c.typed, err)
				}
				lines := strings.Split(strings.TrimSpace(string(said)), "\n")
				if last := lines[len(lines)-1]; last != c.want {
					t.Errorf("%q and tab: nvsharectl is given %s, want %s", c.typed, last, c.want)
				}
			}
		})
	}
}
