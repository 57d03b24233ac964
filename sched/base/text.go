// SPDX-License-Identifier: Apache-2.0

package base

import (
	"fmt"
	"reflect"
	"strings"
)

// Text writes an event or an action for logs and scripts: its name, and its fields as
// Fields has them.
func Text(v any) string {
	name := ""
	switch v := v.(type) {
	case Event:
		name = v.Event()
	case Action:
		name = v.Action()
	}
	return strings.TrimSuffix(name+" "+Fields(v), " ")
}

// Fields writes the fields of a struct in the forms that their tags give: `always:"epoch=%v"`,
// or `text:"epoch=%v"` where a zero value says nothing. Of fields without a tag only Client is
// written, and of arrays what is not zero.
func Fields(v any) string {
	var words []string
	add := func(form string, v reflect.Value) {
		if strings.Contains(form, "%") {
			form = fmt.Sprintf(form, v)
		}
		words = append(words, form)
	}
	s := reflect.ValueOf(v)
	for i := range s.NumField() {
		f, tag := s.Field(i), s.Type().Field(i).Tag
		form, always := tag.Lookup("always")
		switch {
		case s.Type().Field(i).Name == "Client":
			add("%v", f)
		case always:
			add(form, f)
		case tag.Get("text") == "" || f.IsZero():
		case f.Kind() == reflect.Array:
			for j := range f.Len() {
				if e := f.Index(j); !e.IsZero() {
					add(tag.Get("text"), e)
				}
			}
		default:
			add(tag.Get("text"), f)
		}
	}
	return strings.Join(words, " ")
}

// Name is the name of a value that is one of a few, the first of which is 0.
func Name[T ~uint8](v T, kind string, names ...string) string {
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("%s(%d)", kind, uint8(v))
}
