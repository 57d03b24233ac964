// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/sirupsen/logrus"
)

// journalLines are lines for systemd's journal, which takes their priority from the
// number in front and knows their time.
type journalLines struct{ logrus.TextFormatter }

// Format is the logrus.Formatter's.
func (f *journalLines) Format(e *logrus.Entry) ([]byte, error) {
	priority := 6 // as in syslog(3)
	switch e.Level {
	case logrus.PanicLevel, logrus.FatalLevel, logrus.ErrorLevel:
		priority = 3
	case logrus.WarnLevel:
		priority = 4
	case logrus.DebugLevel, logrus.TraceLevel:
		priority = 7
	}
	line, err := f.TextFormatter.Format(e)
	return append(fmt.Appendf(nil, "<%d>", priority), line...), err
}
