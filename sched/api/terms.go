// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// Terms are what a tenant may have of each GPU and what it is promised, all its
// processes together: the fields of a Share, and the memory limit. A field that
// is zero is not said. The JSON names are those of the scheduler's record.
type Terms struct {
	MemoryLimit uint64     `json:"memory,omitempty"`   // bytes
	CoreLimit   uint32     `json:"limit,omitempty"`    // percent of the time
	CoreRequest uint32     `json:"request,omitempty"`  // percent of the time
	Weight      uint32     `json:"weight,omitempty"`   //
	Priority    Priority   `json:"priority,omitempty"` //
	Gang        string     `json:"gang,omitempty"`     //
	MemoryMode  MemoryMode `json:"memory_mode,omitempty"`
	Overlap     string     `json:"overlap,omitempty"`    // fixed when a container starts
	Migratable  bool       `json:"migratable,omitempty"` // as above
	// SuspendAfter is in seconds; SuspendNever: never.
	SuspendAfter uint32 `json:"suspend_after,omitempty"`
}

// FieldSet is a set of fields of Terms.
type FieldSet uint

// The fields of Terms, and all of them.
const (
	MemoryLimitField FieldSet = 1 << iota
	CoreLimitField
	CoreRequestField
	WeightField
	PriorityField
	GangField
	MemoryModeField
	OverlapField
	MigratableField
	SuspendAfterField

	AllFields = 1<<iota - 1
)

// FixedFields are fixed when a container starts: nothing changes them later.
const FixedFields = OverlapField | MigratableField

// Field is one field of Terms, as all programs know it.
type Field struct {
	ID    FieldSet
	Name  string // for people: "core limit"
	Key   string // the flag of nvsharectl set, and the end of the annotation: "core-limit"
	Usage string // of that flag
	Short string // stands before the value where there is little room

	keep   func(*Keep) *bool
	access access
}

// Fields is the table of all fields of Terms, in the order in which people are
// shown them. Programs that read, check, keep or show terms go through it.
var Fields = []Field{
	{MemoryLimitField, "memory limit", "memory-limit", "the `size`, like 8Gi; a bare number means MiB; or none", "memory ",
		func(k *Keep) *bool { return &k.MemoryLimit },
		field[uint64]{func(t *Terms) *uint64 { return &t.MemoryLimit }, nil, func(r *SetShareRequest) **uint64 { return &r.MemoryBytes },
			ParseMemoryLimit, FormatMemory, checkMemory}},
	{CoreLimitField, "core limit", "core-limit", "at most this `percentage` of the GPU's time, 1 to 100, or none", "limit ",
		func(k *Keep) *bool { return &k.CoreLimit },
		field[uint32]{func(t *Terms) *uint32 { return &t.CoreLimit }, func(s *Share) *uint32 { return &s.CoreLimit }, func(r *SetShareRequest) **uint32 { return &r.CoreLimit },
			ParsePercent, FormatPercent, atMost(100, "a percentage from 1 to 100")}},
	{CoreRequestField, "core request", "core-request", "at least this `percentage` of the GPU's time when it wants it, 1 to 100, or none", "request ",
		func(k *Keep) *bool { return &k.CoreRequest },
		field[uint32]{func(t *Terms) *uint32 { return &t.CoreRequest }, func(s *Share) *uint32 { return &s.CoreRequest }, func(r *SetShareRequest) **uint32 { return &r.CoreRequest },
			ParsePercent, FormatPercent, atMost(100, "a percentage from 1 to 100")}},
	{WeightField, "weight", "weight", "its part of what nobody was promised: a `number` from 1 to 10000, or none, which is 100", "weight ",
		func(k *Keep) *bool { return &k.Weight },
		field[uint32]{func(t *Terms) *uint32 { return &t.Weight }, func(s *Share) *uint32 { return &s.Weight }, func(r *SetShareRequest) **uint32 { return &r.Weight },
			ParseWeight, FormatWeight, atMost(MaxWeight, fmt.Sprintf("a number from 1 to %d", MaxWeight))}},
	{PriorityField, "priority", "priority", "`batch|latency`: whether it waits for its turn; or none", "",
		func(k *Keep) *bool { return &k.Priority },
		field[Priority]{func(t *Terms) *Priority { return &t.Priority }, func(s *Share) *Priority { return &s.Priority }, func(r *SetShareRequest) **Priority { return &r.Priority },
			ParsePriority, FormatPriority, priorities.check}},
	{GangField, "gang", "gang", "the `name` of those, in its namespace, that get GPUs together with it; true: its own processes; or none", "gang ",
		func(k *Keep) *bool { return &k.Gang },
		field[string]{func(t *Terms) *string { return &t.Gang }, func(s *Share) *string { return &s.Gang }, func(r *SetShareRequest) **string { return &r.Gang },
			ParseGang, FormatGang, checkName}},
	{MemoryModeField, "memory mode", "memory-mode", "`swap|resident|managed`: whether its memory may be moved off a GPU that is promised beyond what it has; or none, which is swap", "",
		func(k *Keep) *bool { return &k.MemoryMode },
		field[MemoryMode]{func(t *Terms) *MemoryMode { return &t.MemoryMode }, func(s *Share) *MemoryMode { return &s.MemoryMode }, func(r *SetShareRequest) **MemoryMode { return &r.MemoryMode },
			ParseMemoryMode, FormatMemoryMode, memoryModes.check}},
	{OverlapField, "overlap group", "overlap", "the `name` of those, of its namespace and user, that run at the same time as it, by MPS", "overlap ",
		func(k *Keep) *bool { return &k.Overlap },
		field[string]{func(t *Terms) *string { return &t.Overlap }, func(s *Share) *string { return &s.Overlap }, func(r *SetShareRequest) **string { return &r.Overlap },
			ParseOverlap, FormatOverlap, checkName}},
	{MigratableField, "migratable", "migratable", "`true|none`: whether it may move to another GPU of the node", "migratable ",
		func(k *Keep) *bool { return &k.Migratable },
		field[bool]{func(t *Terms) *bool { return &t.Migratable }, func(s *Share) *bool { return &s.Migratable }, func(r *SetShareRequest) **bool { return &r.Migratable },
			ParseMigratable, FormatMigratable, func(bool) error { return nil }}},
	{SuspendAfterField, "suspend after", "suspend-after", "the `time`, like 10m, after which a process that does not use the GPU leaves it, with its memory; never; or none, which is as the scheduler says", "suspended after ",
		func(k *Keep) *bool { return &k.SuspendAfter },
		field[uint32]{func(t *Terms) *uint32 { return &t.SuspendAfter }, func(s *Share) *uint32 { return &s.SuspendAfterS }, func(r *SetShareRequest) **uint32 { return &r.SuspendAfterS },
			ParseSuspendAfter, FormatSuspendAfter, checkSuspendAfter}},
}

// MigratableAnnotation says of a container that it may move to another GPU.
const MigratableAnnotation = "nvshare.com/gpu-migratable"

// Annotation is the key by which pods say the field.
func (f *Field) Annotation() string { return "nvshare.com/gpu-" + f.Key }

// Said tells whether terms say the field.
func (f *Field) Said(t Terms) bool { return f.access.said(&t) }

// Parse reads a value as people write it. Terms that it returns an error for are
// not changed.
func (f *Field) Parse(t *Terms, text string) error { return f.access.parse(t, text) }

// Format writes the value for people. Of terms that do not say the field it writes
// what holds then.
func (f *Field) Format(t Terms) string { return f.access.format(&t) }

// access reads and writes one field.
type access interface {
	said(*Terms) bool
	parse(*Terms, string) error
	format(*Terms) string
	check(*Terms) error
	copy(to, from *Terms)
	fromShare(*Terms, *Share)
	toShare(*Share, *Terms)
	fromRequest(*Terms, *SetShareRequest) bool
	toRequest(*SetShareRequest, *Terms)
}

// field says where the terms and the messages have a field of type T, and what its
// values are.
type field[T comparable] struct {
	terms      func(*Terms) *T
	share      func(*Share) *T // nil: the message does not have it
	request    func(*SetShareRequest) **T
	parseText  func(string) (T, error)
	formatText func(T) string
	valid      func(T) error
}

func (f field[T]) said(t *Terms) bool {
	var unsaid T
	return *f.terms(t) != unsaid
}

func (f field[T]) parse(t *Terms, text string) error {
	v, err := f.parseText(text)
	if err == nil {
		*f.terms(t) = v
	}
	return err
}

func (f field[T]) format(t *Terms) string { return f.formatText(*f.terms(t)) }
func (f field[T]) check(t *Terms) error   { return f.valid(*f.terms(t)) }
func (f field[T]) copy(to, from *Terms)   { *f.terms(to) = *f.terms(from) }

func (f field[T]) fromShare(t *Terms, s *Share) {
	if f.share != nil && s != nil {
		*f.terms(t) = *f.share(s)
	}
}

func (f field[T]) toShare(s *Share, t *Terms) {
	if f.share != nil {
		*f.share(s) = *f.terms(t)
	}
}

func (f field[T]) fromRequest(t *Terms, r *SetShareRequest) bool {
	v := *f.request(r)
	if v != nil {
		*f.terms(t) = *v
	}
	return v != nil
}

func (f field[T]) toRequest(r *SetShareRequest, t *Terms) {
	v := *f.terms(t)
	*f.request(r) = &v
}

// TermsOf returns the terms that a share and a memory limit are; s may be nil.
func TermsOf(s *Share, memoryLimit uint64) Terms {
	t := Terms{MemoryLimit: memoryLimit}
	for _, f := range Fields {
		f.access.fromShare(&t, s)
	}
	return t
}

// Terms returns the terms of a container, as its pod says them.
func (x *Container) Terms() Terms { return TermsOf(x.GetShare(), x.GetMemoryLimitBytes()) }

// SetTerms changes the terms of a container.
func (x *Container) SetTerms(t Terms) { x.Share, x.MemoryLimitBytes = t.Share(), t.MemoryLimit }

// Share returns the message, which lacks the memory limit.
func (t Terms) Share() *Share {
	s := &Share{}
	for _, f := range Fields {
		f.access.toShare(s, &t)
	}
	return s
}

// Terms returns what a request changes, and which fields these are. A field that
// is in the set and not said is to be removed.
func (x *SetShareRequest) Terms() (t Terms, fields FieldSet) {
	for _, f := range Fields {
		if f.access.fromRequest(&t, x) {
			fields |= f.ID
		}
	}
	return t, fields
}

// Change has a request change these fields.
func (x *SetShareRequest) Change(t Terms, fields FieldSet) {
	for _, f := range Fields {
		if fields&f.ID != 0 {
			f.access.toRequest(x, &t)
		}
	}
}

// Fields returns the set that the message is.
func (x *Keep) Fields() (fields FieldSet) {
	for _, f := range Fields {
		if x != nil && *f.keep(x) {
			fields |= f.ID
		}
	}
	return fields
}

// Keep returns the message that the set is.
func (s FieldSet) Keep() *Keep {
	k := &Keep{}
	for _, f := range Fields {
		*f.keep(k) = s&f.ID != 0
	}
	return k
}

// Copy takes these fields, said or not, from other terms.
func (t *Terms) Copy(from Terms, fields FieldSet) {
	for _, f := range Fields {
		if fields&f.ID != 0 {
			f.access.copy(t, &from)
		}
	}
}

// Or returns t with the fields that it does not say from other terms.
func (t Terms) Or(other Terms) Terms {
	for _, f := range Fields {
		if !f.access.said(&t) {
			f.access.copy(&t, &other)
		}
	}
	return t
}

// Validate returns an error that names a field whose value nobody can have, or nil.
// It looks at each field alone; see Consistent.
func (t Terms) Validate() error {
	for _, f := range Fields {
		if err := f.access.check(&t); err != nil {
			return fmt.Errorf("%s %w", f.Name, err)
		}
	}
	return nil
}

// Consistent returns an error if the terms contradict each other.
func (t Terms) Consistent() error {
	if t.CoreLimit != 0 && t.CoreRequest > t.CoreLimit {
		return fmt.Errorf("core request %d %% is above the core limit of %d %%", t.CoreRequest, t.CoreLimit)
	}
	if t.Gang != "" && t.Overlap != "" {
		return errors.New("it is in a gang and in an overlap group: only one of them is possible")
	}
	return nil
}

// Part is what one tenant was promised of a GPU.
type Part struct {
	Container   *Container // id empty: a user's processes outside containers
	Uid         uint32     // of that user
	CoreRequest uint32     // percent of the time; 0: none
	MemoryBytes uint64     // its memory limit; 0: none
}

// Promised returns what was promised of a GPU, also to tenants that do not use
// it now: the greatest part of the time first, then of the memory.
func Promised(g *GPU) (parts []Part) {
	of := func(c *Container, uid uint32) *Part {
		id := c.GetId()
		i := slices.IndexFunc(parts, func(p Part) bool { return p.Container.GetId() == id && (id != "" || p.Uid == uid) })
		if i < 0 {
			i = len(parts)
			parts = append(parts, Part{Container: c, Uid: uid})
		}
		return &parts[i]
	}
	for _, p := range g.GetPromises() {
		of(p.Container, p.Uid).CoreRequest = p.CoreRequest
	}
	for _, m := range g.GetMemory() {
		// A limit holds on each GPU, and is promised of those that a container has.
		has := m.Container.GetGpus()
		if m.LimitBytes != 0 && (len(has) == 0 || slices.Contains(has, g.Uuid)) {
			of(m.Container, m.Uid).MemoryBytes = m.LimitBytes
		}
	}
	slices.SortStableFunc(parts, func(a, b Part) int {
		return cmp.Or(cmp.Compare(b.CoreRequest, a.CoreRequest), cmp.Compare(b.MemoryBytes, a.MemoryBytes),
			cmp.Compare(Tenant(a.Container, a.Uid), Tenant(b.Container, b.Uid)))
	})
	return parts
}
