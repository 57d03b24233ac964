// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"regexp"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Memory limits that ParseMemory accepts, bytes. Less is not enough for any
// program, so somebody meant another unit.
const (
	MinMemory = 1 << 20
	MaxMemory = 1 << 50
)

var (
	bareNumber = regexp.MustCompile(`^[0-9]{1,18}(\.[0-9]{1,18})?$`)
	// quantity is narrower than what Kubernetes takes: no sign, no unit below
	// one, and no exponent that takes minutes to work out.
	quantity = regexp.MustCompile(`^[0-9]{1,18}(\.[0-9]{1,18})?([KMGTPE]i|[kMGTPE]|[eE]\+?[0-9]{1,2})$`)
)

// ParseMemory reads a size of device memory as people give it: a Kubernetes
// quantity ("8Gi", "4096Mi", "4G" = 4e9 bytes). A bare number means MiB.
func ParseMemory(s string) (bytes uint64, err error) {
	text := s
	switch {
	case bareNumber.MatchString(s):
		text += "Mi"
	case !quantity.MatchString(s):
		return 0, fmt.Errorf("%.64q is not a size of memory: give a quantity such as 8Gi, 4096Mi or 4G; a bare number means MiB", s)
	}
	q, err := resource.ParseQuantity(text)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%q is not a size of memory: %w", s, err)
	case q.CmpInt64(MinMemory) < 0:
		return 0, fmt.Errorf("%q is %v bytes, less than 1Mi", s, q.Value())
	case q.CmpInt64(MaxMemory) > 0:
		return 0, fmt.Errorf("%q is more than 1Pi", s)
	}
	return uint64(q.Value()), nil
}

// FormatMemory writes a size exactly; 0 is "none".
func FormatMemory(bytes uint64) string {
	if bytes == 0 {
		return "none"
	}
	n := int64(min(bytes, MaxMemory))
	text := resource.NewQuantity(n, resource.BinarySI).String()
	if decimal := resource.NewQuantity(n, resource.DecimalSI).String(); len(decimal) < len(text) {
		text = decimal
	}
	if bareNumber.MatchString(text) {
		text += " bytes"
	}
	return text
}
