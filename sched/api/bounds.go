// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"strings"
)

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
