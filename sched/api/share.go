// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// MaxWeight is the greatest weight of a share.
const MaxWeight = 10000

// GangOfItself is the gang of a tenant whose own processes get GPUs together.
const GangOfItself = "true"

var (
	percentage = regexp.MustCompile(`^[0-9]{1,4}%?$`)
	weight     = regexp.MustCompile(`^[0-9]{1,6}$`)
	// gangName is the syntax of a label's value in Kubernetes.
	gangName = regexp.MustCompile(`^[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?$`)
)

// ParsePercent reads a part of a GPU's time: "60" or "60%".
func ParsePercent(s string) (uint32, error) {
	n, err := strconv.ParseUint(strings.TrimSuffix(s, "%"), 10, 32)
	if !percentage.MatchString(s) || err != nil || n < 1 || n > 100 {
		return 0, fmt.Errorf("%.64q is not a percentage of the GPU's time: give a whole number from 1 to 100", s)
	}
	return uint32(n), nil
}

// ParseWeight reads the weight of a share.
func ParseWeight(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if !weight.MatchString(s) || err != nil || n < 1 || n > MaxWeight {
		return 0, fmt.Errorf("%.64q is not a weight: give a whole number from 1 to %d", s, MaxWeight)
	}
	return uint32(n), nil
}

// words are the values of an enumeration, from 1 on, as people write them. 0 is not said: then the
// first one holds.
type words[E ~int32] struct {
	what string
	all  []string
}

var (
	priorities  = words[Priority]{"priority", []string{"batch", "latency"}}
	memoryModes = words[MemoryMode]{"memory mode", []string{"swap", "resident", "managed"}}
)

func (w words[E]) choice() string {
	last := len(w.all) - 1
	return strings.Join(w.all[:last], ", ") + " or " + w.all[last]
}

func (w words[E]) parse(s string) (E, error) {
	i := slices.Index(w.all, s)
	if i < 0 {
		return 0, fmt.Errorf("%.64q is not a %s: give %s", s, w.what, w.choice())
	}
	return E(i + 1), nil
}

func (w words[E]) format(e E) string {
	if w.check(e) != nil {
		return w.all[0]
	}
	return w.all[max(e, 1)-1]
}

func (w words[E]) check(e E) error {
	if e < 0 || int(e) > len(w.all) {
		return fmt.Errorf("%d is unknown: give %s", e, w.choice())
	}
	return nil
}

// ParsePriority reads "batch" or "latency".
func ParsePriority(s string) (Priority, error) { return priorities.parse(s) }

// ParseMemoryMode reads "swap", "resident" or "managed".
func ParseMemoryMode(s string) (MemoryMode, error) { return memoryModes.parse(s) }

// FormatPriority writes a priority.
func FormatPriority(p Priority) string { return priorities.format(p) }

// FormatMemoryMode writes a memory mode.
func FormatMemoryMode(m MemoryMode) string { return memoryModes.format(m) }

// ParseGang reads the name of a gang, or "true" (GangOfItself). It returns "", no
// gang, for "false" and "none".
func ParseGang(s string) (string, error) {
	switch {
	case s == "false" || s == "none":
		return "", nil
	case !gangName.MatchString(s):
		return "", fmt.Errorf("%.64q is not a gang: give true, or a name of up to 63 letters, digits and . _ - that begins and ends with a letter or digit", s)
	}
	return s, nil
}

// SuspendNever, in seconds, is the time of those who are never suspended for being idle.
const SuspendNever = math.MaxUint32

// maxSuspendAfter, in seconds, is a year.
const maxSuspendAfter = 365 * 24 * 60 * 60

// ParseSuspendAfter reads a time, like 10m, or "never". It returns seconds.
func ParseSuspendAfter(s string) (uint32, error) {
	if s == "never" {
		return SuspendNever, nil
	}
	d, err := ParseDuration(s)
	if err != nil || d < time.Second || d > maxSuspendAfter*time.Second {
		return 0, fmt.Errorf("%.64q is not a time after which a process is suspended: give one from 1s to 365 days, like 10m, or never", s)
	}
	return uint32(d / time.Second), nil
}

// FormatSuspendAfter writes such a time for people; 0 is what the scheduler says.
func FormatSuspendAfter(seconds uint32) string {
	switch seconds {
	case 0:
		return "as --suspend-after"
	case SuspendNever:
		return "never"
	}
	return (time.Duration(seconds) * time.Second).String()
}

// FormatPercent writes a part of a GPU's time; 0 is "none".
func FormatPercent(n uint32) string {
	if n == 0 {
		return "none"
	}
	return fmt.Sprintf("%d%%", n)
}

// FormatWeight writes a weight; a tenant without one has 100.
func FormatWeight(n uint32) string {
	if n == 0 {
		return "100"
	}
	return strconv.FormatUint(uint64(n), 10)
}

// FormatGang writes a gang for people; "" is "none". A gang of a namespace has that before its name,
// as in ml/ring.
func FormatGang(gang string) string {
	switch gang {
	case "":
		return "none"
	case GangOfItself:
		return "of itself"
	}
	return gang
}

// JSON has priorities and memory modes in the words that people use. A word that
// only a later version knows counts as not said.

func (p Priority) MarshalText() ([]byte, error) { return []byte(FormatPriority(p)), nil }
func (p *Priority) UnmarshalText(text []byte) error {
	*p, _ = ParsePriority(string(text))
	return nil
}

func (m MemoryMode) MarshalText() ([]byte, error) { return []byte(FormatMemoryMode(m)), nil }
func (m *MemoryMode) UnmarshalText(text []byte) error {
	*m, _ = ParseMemoryMode(string(text))
	return nil
}

// The values that a share may have. Zero, which is not said, is always one.

func checkMemory(bytes uint64) error {
	if bytes != 0 && (bytes < MinMemory || bytes > MaxMemory) {
		return fmt.Errorf("%d bytes is out of range: give a size from 1Mi to 1Pi", bytes)
	}
	return nil
}

// atMost returns what refuses a number above a bound; give says what to give.
func atMost(most uint32, give string) func(uint32) error {
	return func(n uint32) error {
		if n > most {
			return fmt.Errorf("%d is out of range: give %s", n, give)
		}
		return nil
	}
}

func checkName(name string) error {
	if name != "" && !gangName.MatchString(name) {
		return fmt.Errorf("%.64q is not a name: give up to 63 letters, digits and . _ - that begin and end with a letter or digit", name)
	}
	return nil
}

func checkSuspendAfter(seconds uint32) error {
	if seconds > maxSuspendAfter && seconds != SuspendNever {
		return fmt.Errorf("%d s is out of range: give a time up to 365 days, or never", seconds)
	}
	return nil
}

// ParseMigratable reads whether a container may move to another GPU.
func ParseMigratable(s string) (bool, error) {
	switch s {
	case "true":
		return true, nil
	case "false", "none":
		return false, nil
	}
	return false, fmt.Errorf("%.64q is neither true nor false", s)
}

// FormatMigratable writes that for people.
func FormatMigratable(may bool) string {
	if may {
		return "true"
	}
	return "none"
}

// Names of settings of GPUs, which say how tenants share a GPU.
const (
	TurnLengthSetting = "turn-length" // the time quantum
	AntiThrashSetting = "anti-thrash"
	SwapShareSetting  = "swap-share"
)

// SwapMemoryZero is GPU.not_swapped where somebody has switched swapping off.
const SwapMemoryZero = "--swap-memory is 0"

// MaxSwapShare is the greatest swap share, percent.
const MaxSwapShare = 50

// ParseSwapShare reads the percentage of the time that moving memory may take; none, or 0: turns
// are as long as the time quantum says.
func ParseSwapShare(s string) (uint32, error) {
	if s == "none" || s == "0" {
		return 0, nil
	}
	n, err := ParsePercent(s)
	if err != nil || n > MaxSwapShare {
		return 0, fmt.Errorf("%.64q is not a share of the time: give a percentage from 1 to %d, or none", s, MaxSwapShare)
	}
	return n, nil
}
