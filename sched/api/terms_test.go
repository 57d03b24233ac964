// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// fullTerms says every field.
var fullTerms = Terms{MemoryLimit: 3 << 30, CoreLimit: 60, CoreRequest: 30, Weight: 7,
	Priority: Priority_PRIORITY_LATENCY, Gang: "ring", MemoryMode: MemoryMode_MEMORY_MODE_RESIDENT, Overlap: "small", Migratable: true}

// one returns terms that say only one field, as fullTerms do.
func one(f *Field) (t Terms) {
	t.Copy(fullTerms, f.ID)
	return t
}

// The table, Terms and the messages have the same fields, and each field goes
// round through all of them alone.
func TestEveryFieldGoesRound(t *testing.T) {
	inTerms := reflect.TypeFor[Terms]()
	if n := inTerms.NumField(); n != len(Fields) {
		t.Errorf("Terms has %d fields, the table %d", n, len(Fields))
	}
	for i := range inTerms.NumField() {
		if reflect.ValueOf(fullTerms).Field(i).IsZero() {
			t.Errorf("fullTerms does not say %s", inTerms.Field(i).Name)
		}
	}
	names := func(m protoreflect.ProtoMessage, without ...protoreflect.Name) (n int) {
		fields := m.ProtoReflect().Descriptor().Fields()
		n = fields.Len()
		for _, name := range without {
			if fields.ByName(name) == nil {
				t.Errorf("%T has no %s", m, name)
			}
			n--
		}
		return n
	}
	if n := names(&Share{}); n != len(Fields)-1 { // without the memory limit
		t.Errorf("Share has %d fields besides the memory limit, the table %d", n, len(Fields)-1)
	}
	if n := names(&Keep{}); n != len(Fields) {
		t.Errorf("Keep has %d fields, the table %d", n, len(Fields))
	}
	if n := names(&SetShareRequest{}, "container", "uid", "gpu"); n != len(Fields) {
		t.Errorf("SetShareRequest changes %d fields, the table has %d", n, len(Fields))
	}

	var all FieldSet
	for i := range Fields {
		f := &Fields[i]
		said := one(f)
		if f.ID == 0 || all&f.ID != 0 || said == (Terms{}) || !f.Said(said) || f.Said(Terms{}) {
			t.Fatalf("%s: said alone it is %+v", f.Name, said)
		}
		all |= f.ID
		for j := range Fields {
			if j != i && Fields[j].Said(said) {
				t.Errorf("%s and %s are one", f.Name, Fields[j].Name)
			}
		}
		through := map[string]Terms{"Or": (Terms{}).Or(said)}
		wire := func(m, to proto.Message) {
			b, err := proto.Marshal(m)
			if err == nil {
				err = proto.Unmarshal(b, to)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		var share Share
		wire(said.Share(), &share)
		through["Share"] = TermsOf(&share, said.MemoryLimit)
		var container Container
		c := &Container{}
		c.SetTerms(said)
		wire(c, &container)
		through["Container"] = container.Terms()
		var request SetShareRequest
		r := &SetShareRequest{}
		r.Change(said, f.ID)
		wire(r, &request)
		got, changes := request.Terms()
		if through["SetShareRequest"] = got; changes != f.ID {
			t.Errorf("%s: a request changes %b, want %b", f.Name, changes, f.ID)
		}
		text, err := json.Marshal(said)
		var recorded Terms
		if err == nil {
			err = json.Unmarshal(text, &recorded)
		}
		if through["JSON"] = recorded; err != nil {
			t.Errorf("%s: JSON %s: %v", f.Name, text, err)
		}
		var parsed Terms
		if err := f.Parse(&parsed, f.Format(said)); err != nil {
			t.Errorf("%s: %v", f.Name, err)
		}
		through["text"] = parsed
		for way, got := range through {
			if got != said {
				t.Errorf("%s, %s: %+v, want %+v", f.Name, way, got, said)
			}
		}
		var keep Keep
		wire(f.ID.Keep(), &keep)
		if got := keep.Fields(); got != f.ID {
			t.Errorf("%s: kept are %b, want %b", f.Name, got, f.ID)
		}
		// A request can also remove it.
		r.Change(Terms{}, f.ID)
		if got, changes := r.Terms(); got != (Terms{}) || changes != f.ID {
			t.Errorf("%s: removed by %+v, %b", f.Name, got, changes)
		}
		if err := f.Parse(&said, "?"); err == nil || said != one(f) {
			t.Errorf("%s: nonsense gives %+v, %v", f.Name, said, err)
		}
	}
	if all != AllFields {
		t.Errorf("all fields are %b, AllFields is %b", all, AllFields)
	}
	if text := "memory limit, core limit, core request, weight, priority, gang, memory mode, overlap group, migratable"; text != strings.Join(fieldNames(), ", ") {
		t.Errorf("the order is %v", fieldNames())
	}
}

func fieldNames() (names []string) {
	for _, f := range Fields {
		names = append(names, f.Name)
	}
	return names
}

// The record of an older scheduler is read as that scheduler meant it, and a word of a later
// one does not spoil the rest.
func TestTermsInTheRecord(t *testing.T) {
	const text = `{"memory":3221225472,"limit":60,"request":30,"weight":7,"priority":"latency","gang":"ring","memory_mode":"resident","overlap":"small","migratable":true}`
	if got, err := json.Marshal(fullTerms); err != nil || string(got) != text {
		t.Errorf("%s, %v", got, err)
	}
	if got, err := json.Marshal(Terms{}); err != nil || string(got) != "{}" {
		t.Errorf("nothing said: %s, %v", got, err)
	}
	var got Terms
	if err := json.Unmarshal([]byte(`{"limit":60,"priority":"realtime","memory_mode":"remote"}`), &got); err != nil || got != (Terms{CoreLimit: 60}) {
		t.Errorf("of a later scheduler: %+v, %v", got, err)
	}
}

// ofAGang is fullTerms without the overlap group, which nobody in a gang can be in.
func ofAGang() Terms {
	t := fullTerms
	t.Overlap = ""
	return t
}

func TestValidateTerms(t *testing.T) {
	for _, s := range []Terms{{}, ofAGang(), {CoreLimit: 100, CoreRequest: 100, Weight: MaxWeight, Gang: "true", MemoryLimit: MaxMemory}, {CoreRequest: 100}} {
		if err := s.Validate(); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
		if err := s.Consistent(); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
	}
	for says, s := range map[string]Terms{
		"core limit 101": {CoreLimit: 101}, "core request 101": {CoreRequest: 101}, "memory limit 8 bytes": {MemoryLimit: 8},
		"weight 10001": {Weight: 10001}, "priority 3": {Priority: 3}, "priority -1": {Priority: -1}, `gang "a b"`: {Gang: "a b"}, "overlap group \"a/b\"": {Overlap: "a/b"},
		"memory mode 4": {MemoryMode: 4}, strings.Repeat("x", 64): {Gang: strings.Repeat("x", 64)},
	} {
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v, want %q", s, err, says)
		}
	}
	if err := (Terms{CoreLimit: 5, CoreRequest: 6}).Consistent(); err == nil || !strings.Contains(err.Error(), "6 % is above the core limit of 5 %") {
		t.Errorf("a request above the limit: %v", err)
	}
	if err := fullTerms.Consistent(); err == nil || !strings.Contains(err.Error(), "only one of them is possible") {
		t.Errorf("a gang and an overlap group: %v", err)
	}
}
