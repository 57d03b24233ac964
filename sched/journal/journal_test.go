// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"io"
	"maps"
	"strings"
	"testing"

	"github.com/coreos/go-systemd/v22/journal"
	"github.com/sirupsen/logrus"
)

type entry struct {
	text     string
	priority journal.Priority
	fields   map[string]string
}

func logTo(h *entries) *logrus.Logger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	log.AddHook(h)
	return log
}

// A line is one entry, with its priority and its fields, whatever a program's name holds.
func TestEntries(t *testing.T) {
	var got []entry
	log := logTo(&entries{program: "nvshare-scheduler", stderr: io.Discard,
		send: func(text string, p journal.Priority, fields map[string]string) error {
			got = append(got, entry{text, p, fields})
			return nil
		}})
	log.WithFields(logrus.Fields{"gpu": "GPU-1", "client": 7}).Warn("fenced")
	log.WithField("command", "evil\nPRIORITY=0\x1b[2J").Info("registered")
	log.Error("broken")
	want := []entry{
		{"fenced client=7 gpu=GPU-1", journal.PriWarning, map[string]string{"NVSHARE_GPU": "GPU-1", "NVSHARE_CLIENT": "7", "SYSLOG_IDENTIFIER": "nvshare-scheduler"}},
		{"registered command=evil�PRIORITY=0�[2J", journal.PriInfo, map[string]string{"NVSHARE_COMMAND": "evil�PRIORITY=0�[2J", "SYSLOG_IDENTIFIER": "nvshare-scheduler"}},
		{"broken", journal.PriErr, map[string]string{"SYSLOG_IDENTIFIER": "nvshare-scheduler"}},
	}
	if len(got) != len(want) {
		t.Fatalf("got %v", got)
	}
	for i, w := range want {
		if g := got[i]; g.text != w.text || g.priority != w.priority || !maps.Equal(g.fields, w.fields) {
			t.Errorf("got %v, want %v", g, w)
		}
	}
}

// What the journal refuses is not lost.
func TestNoJournal(t *testing.T) {
	var stderr strings.Builder
	log := logTo(&entries{stderr: &stderr, send: func(string, journal.Priority, map[string]string) error { return errors.New("no journal") }})
	log.WithField("pid", 3).Warn("fenced")
	if want := "<4>fenced pid=3\n"; stderr.String() != want {
		t.Errorf("got %q, want %q", &stderr, want)
	}
}
