// SPDX-License-Identifier: Apache-2.0

// Package journal makes the log of a daemon. Each line goes to standard error as text; where
// that is systemd's journal, the line is an entry with a priority and fields: NVSHARE_GPU,
// NVSHARE_CLIENT, NVSHARE_PID, NVSHARE_COMMAND, NVSHARE_CONTAINER, NVSHARE_REASON. So
// journalctl NVSHARE_GPU=UUID finds the lines about one GPU.
//
// An entry whose text holds control characters cannot forge another: they are replaced. A
// line that the journal refuses goes to standard error.
package journal

import (
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"github.com/coreos/go-systemd/v22/journal"
	"github.com/sirupsen/logrus"
)

// New returns the log of this program. NVSHARE_DEBUG=1 in the environment has it log more.
func New() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(os.Stderr)
	if os.Getenv("NVSHARE_DEBUG") == "1" {
		log.SetLevel(logrus.DebugLevel)
	}
	if yes, err := journal.StderrIsJournalStream(); err == nil && yes {
		log.AddHook(&entries{send: journal.Send, stderr: os.Stderr, program: filepath.Base(os.Args[0])})
		log.SetOutput(io.Discard)
	}
	return log
}

// entries is a logrus.Hook that makes an entry of the journal of each line.
type entries struct {
	send    func(message string, priority journal.Priority, fields map[string]string) error
	stderr  io.Writer
	program string
}

func (h *entries) Levels() []logrus.Level { return logrus.AllLevels }

func (h *entries) Fire(e *logrus.Entry) error {
	fields := map[string]string{"SYSLOG_IDENTIFIER": h.program}
	text := e.Message
	for _, key := range slices.Sorted(maps.Keys(e.Data)) {
		value := oneLine(fmt.Sprint(e.Data[key]))
		fields["NVSHARE_"+strings.ToUpper(key)] = value
		text += " " + key + "=" + value
	}
	text = oneLine(text)
	if err := h.send(text, priority(e.Level), fields); err != nil {
		_, err = fmt.Fprintf(h.stderr, "<%d>%s\n", priority(e.Level), text) // as in sd-daemon(3)
		return err
	}
	return nil
}

func priority(l logrus.Level) journal.Priority {
	switch l {
	case logrus.PanicLevel, logrus.FatalLevel, logrus.ErrorLevel:
		return journal.PriErr
	case logrus.WarnLevel:
		return journal.PriWarning
	case logrus.DebugLevel, logrus.TraceLevel:
		return journal.PriDebug
	}
	return journal.PriInfo
}

// oneLine replaces control characters, which programs' and containers' names may hold.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}
