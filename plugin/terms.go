// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"strings"

	sched "github.com/nvshare/nvshare/sched/api"
)

// Keys of terms that messages name. Each field of sched.Fields has one.
const (
	MemoryLimitAnnotation = "nvshare.com/gpu-memory-limit"
	CoreLimitAnnotation   = "nvshare.com/gpu-core-limit"
	CoreRequestAnnotation = "nvshare.com/gpu-core-request"
	OverlapAnnotation     = sched.OverlapAnnotation
)

// parseTerms reads the terms of a container from annotations. The error names the
// annotations that are wrong, and wrong has their fields, which the terms do not
// say, or less of.
func parseTerms(annotations map[string]string, container string) (t sched.Terms, wrong sched.FieldSet, err error) {
	var errs []error
	for _, f := range sched.Fields {
		key, value, ok := annotationFor(annotations, f.Annotation(), container)
		if !ok {
			continue
		}
		if err := f.Parse(&t, strings.TrimSpace(value)); err != nil {
			errs = append(errs, annotationError(key, value, err))
			wrong |= f.ID
		}
	}
	if _, value, ok := annotationFor(annotations, Annotation, container); ok && isAny(value) {
		t.Migratable = true
	}
	if err := t.Consistent(); err != nil {
		key, value, _ := annotationFor(annotations, CoreRequestAnnotation, container)
		limitKey, limit, _ := annotationFor(annotations, CoreLimitAnnotation, container)
		errs = append(errs, annotationError(key, value, fmt.Errorf("%w, %s=%q", err, limitKey, shown(limit))))
		t.CoreRequest = t.CoreLimit
		wrong |= coreFields
	}
	return t, wrong, errors.Join(errs...)
}

// coreFields are those that may contradict each other.
const coreFields = sched.CoreLimitField | sched.CoreRequestField

// describeTerms writes terms for the log.
func describeTerms(t sched.Terms) string {
	var said []string
	for _, f := range sched.Fields {
		if f.Said(t) || f.ID == sched.MemoryLimitField {
			said = append(said, f.Name+" "+f.Format(t))
		}
	}
	return strings.Join(said, ", ")
}
