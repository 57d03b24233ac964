// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Memory limits that ParseMemory accepts, bytes. Less is not enough for any
// program, so somebody meant another unit.
const (
	MinMemory = 1 << 20
	MaxMemory = 1 << 50
)

// FewMemory is a memory limit with which no CUDA program starts, bytes.
const FewMemory = 256 << 20

var (
	// almost is what people write for a quantity: 8GB, 8 GiB, 8g.
	almost     = regexp.MustCompile(`^([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([kKmMgGtT])([iI]?)[bB]?$`)
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
		return 0, fmt.Errorf("%.64q is not a size of memory%s: give a quantity such as 8Gi, 4096Mi or 4G; a bare number means MiB", s, memoryMeant(s))
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

// memoryMeant asks for the quantity that somebody almost wrote; "": not known.
func memoryMeant(s string) string {
	parts := almost.FindStringSubmatch(s)
	if parts == nil {
		return ""
	}
	unit := strings.ToUpper(parts[2])
	if unit == "K" && parts[3] == "" {
		unit = "k"
	}
	return fmt.Sprintf(" (did you mean %s%s%s?)", parts[1], unit, strings.ToLower(parts[3]))
}

// ParseMemoryLimit is ParseMemory for a memory limit. A number that is hardly meant as MiB is
// refused.
func ParseMemoryLimit(s string) (bytes uint64, err error) {
	bytes, err = ParseMemory(s)
	if err == nil && bytes < FewMemory && bareNumber.MatchString(s) {
		return 0, fmt.Errorf("%q without a unit is %s MiB, too little for any CUDA program (did you mean %sGi?): give a unit", s, s, s)
	}
	return bytes, err
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

// AllNamespaces stands for every namespace.
const AllNamespaces = "*"

// Bounds are the greatest values that an administrator allows, by namespace, or of AllNamespaces for the
// others.
type Bounds map[string]uint32

// ParseBounds reads a list like "100,prod=1000", each of whose values parse reads; "": no bound.
func ParseBounds(list string, parse func(string) (uint32, error)) (b Bounds, err error) {
	for _, rule := range strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' }) {
		namespace, value, named := strings.Cut(rule, "=")
		if !named {
			namespace, value = AllNamespaces, rule
		}
		n, err := parse(value)
		if err == nil && namespace == "" {
			err = fmt.Errorf("%.64q names no namespace", rule)
		}
		if err != nil {
			return nil, fmt.Errorf("%w (give a bound for all, or NAMESPACE=BOUND)", err)
		}
		if b == nil {
			b = Bounds{}
		}
		b[namespace] = n
	}
	return b, nil
}

// Of returns the bound of a namespace, if it has one.
func (b Bounds) Of(namespace string) (most uint32, bounded bool) {
	if most, bounded = b[namespace]; !bounded {
		most, bounded = b[AllNamespaces]
	}
	return most, bounded
}
