// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// MaxWeight is the greatest weight of a share.
const MaxWeight = 10000

// GangOfItself is the gang of a tenant whose processes get GPUs together, and
// with nobody else.
const GangOfItself = "true"

var (
	percentage = regexp.MustCompile(`^[0-9]{1,4}%?$`)
	weight     = regexp.MustCompile(`^[0-9]{1,6}$`)
	// gangName is what Kubernetes takes as the value of a label.
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
		return 0, fmt.Errorf("%.64q is not a weight: give a whole number from 1 to %d; a tenant without one has 100", s, MaxWeight)
	}
	return uint32(n), nil
}

// ParsePriority reads "batch" or "latency".
func ParsePriority(s string) (Priority, error) {
	switch s {
	case "batch":
		return Priority_PRIORITY_BATCH, nil
	case "latency":
		return Priority_PRIORITY_LATENCY, nil
	}
	return 0, fmt.Errorf("%.64q is not a priority: give batch or latency", s)
}

// ParseMemoryMode reads "swap", "resident" or "managed".
func ParseMemoryMode(s string) (MemoryMode, error) {
	switch s {
	case "swap":
		return MemoryMode_MEMORY_MODE_SWAP, nil
	case "resident":
		return MemoryMode_MEMORY_MODE_RESIDENT, nil
	case "managed":
		return MemoryMode_MEMORY_MODE_MANAGED, nil
	}
	return 0, fmt.Errorf("%.64q is not a memory mode: give swap, resident or managed", s)
}

// FormatMemoryMode writes a memory mode; what is not said is swap.
func FormatMemoryMode(m MemoryMode) string {
	switch m {
	case MemoryMode_MEMORY_MODE_RESIDENT:
		return "resident"
	case MemoryMode_MEMORY_MODE_MANAGED:
		return "managed"
	}
	return "swap"
}

// ParseGang reads the name of a gang, "true" (GangOfItself), or "false" or "none":
// no gang, which is "".
func ParseGang(s string) (string, error) {
	switch {
	case s == "false" || s == "none":
		return "", nil
	case !gangName.MatchString(s):
		return "", fmt.Errorf("%.64q is not a gang: give true, or a name of up to 63 letters, digits and . _ - that begins and ends with a letter or digit", s)
	}
	return s, nil
}

// Validate returns an error that says what is wrong with a share that somebody
// asks for, or nil.
func (s *Share) Validate() error {
	switch {
	case s.GetCoreLimit() > 100:
		return fmt.Errorf("core limit %d: it must be from 1 to 100 %%", s.CoreLimit)
	case s.GetCoreRequest() > 100:
		return fmt.Errorf("core request %d: it must be from 1 to 100 %%", s.CoreRequest)
	case s.GetCoreLimit() != 0 && s.CoreRequest > s.CoreLimit:
		return fmt.Errorf("the core request, %d %%, is above the core limit, %d %%", s.CoreRequest, s.CoreLimit)
	case s.GetWeight() > MaxWeight:
		return fmt.Errorf("weight %d: it must be from 1 to %d", s.Weight, MaxWeight)
	case s.GetPriority() < 0 || s.GetPriority() > Priority_PRIORITY_LATENCY:
		return fmt.Errorf("priority %d: unknown", s.Priority)
	case s.GetMemoryMode() < 0 || s.GetMemoryMode() > MemoryMode_MEMORY_MODE_MANAGED:
		return fmt.Errorf("memory mode %d: unknown", s.MemoryMode)
	case s.GetGang() != "" && !gangName.MatchString(s.Gang):
		return fmt.Errorf("gang %.64q: not a name", s.Gang)
	}
	return nil
}

// FormatPercent writes a part of a GPU's time; 0 is "none".
func FormatPercent(n uint32) string {
	if n == 0 {
		return "none"
	}
	return fmt.Sprintf("%d%%", n)
}

// FormatWeight writes a weight; 0 is that of a tenant without one.
func FormatWeight(n uint32) string {
	if n == 0 {
		return "100"
	}
	return strconv.FormatUint(uint64(n), 10)
}

// FormatPriority writes a priority; what is not said is batch.
func FormatPriority(p Priority) string {
	if p == Priority_PRIORITY_LATENCY {
		return "latency"
	}
	return "batch"
}

// FormatGang writes a gang as people know it; "" is "none".
func FormatGang(gang string) string {
	switch gang {
	case "":
		return "none"
	case GangOfItself:
		return "of itself"
	}
	return gang
}
