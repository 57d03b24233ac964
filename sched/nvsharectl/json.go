// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/nvshare/nvshare/sched/api"
)

// plain is a message of the API as -o json prints it. Names are those of the API, but x_ns is
// x_seconds, x_permille is x, a part of 1, and time_ns is a time. Enums are words. Numbers that may
// exceed 2^53 are strings. What is not set is left out, but for numbers, bools and lists.
func plain(m protoreflect.Message) map[string]any {
	out := map[string]any{}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		name, v := string(f.Name()), m.Get(f)
		switch {
		case f.IsList():
			all := []any{}
			for j := range v.List().Len() {
				all = append(all, plainValue(f, v.List().Get(j)))
			}
			out[name] = all
		case f.HasPresence() && !m.Has(f), f.Kind() == protoreflect.BytesKind, f.Kind() == protoreflect.StringKind && v.String() == "":
		case name == "time_ns":
			out["time"] = time.Unix(0, v.Int()).UTC()
		case strings.HasSuffix(name, "_ns"):
			out[strings.TrimSuffix(name, "_ns")+"_seconds"] = seconds(v.Int())
		case strings.HasSuffix(name, "_permille"):
			out[strings.TrimSuffix(name, "_permille")] = float64(v.Uint()) / 1000
		case f.Kind() == protoreflect.Uint64Kind && (name == "id" || name == "client" || name == "epoch"):
			out[name] = strconv.FormatUint(v.Uint(), 10)
		default:
			if value := plainValue(f, v); value != "" {
				out[name] = value
			}
		}
	}
	return out
}

func plainValue(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return plain(v.Message())
	case protoreflect.EnumKind:
		return wordOf(f.Enum(), v.Enum())
	}
	return v.Interface()
}

// word is an enum's value as people and programs have it: swap-out for EVENT_TYPE_SWAP_OUT. "": it is
// not specified.
func word(e protoreflect.Enum) string { return wordOf(e.Descriptor(), e.Number()) }

var humps = regexp.MustCompile(`([a-z])([A-Z])`)

func wordOf(enum protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	v := enum.Values().ByNumber(n)
	if v == nil { // of a newer scheduler
		return fmt.Sprint(n)
	}
	prefix := strings.ToUpper(humps.ReplaceAllString(string(enum.Name()), "${1}_$2")) + "_"
	word := strings.ToLower(strings.TrimPrefix(string(v.Name()), prefix))
	if word == "unspecified" {
		return ""
	}
	return strings.ReplaceAll(word, "_", "-")
}

func seconds(ns int64) float64 { return time.Duration(ns).Seconds() }

// plainStatus is a status, with what its readers would have to work out. tenants has all that use a
// GPU, and what each does: also members of gangs, of which the API has clients only.
func plainStatus(r *api.StatusResponse) map[string]any {
	out := plain(r.ProtoReflect())
	out["healthy"] = problems(r) == 0
	for i, gpu := range out["gpus"].([]any) {
		all := []any{}
		for _, t := range tenantsOf(r.Gpus[i]) {
			one := plain(t.Use.ProtoReflect())
			one["container"], one["uid"], one["state"] = plain(t.Container.ProtoReflect()), t.Uid, t.State()
			all = append(all, one)
		}
		gpu.(map[string]any)["tenants"] = all
	}
	return out
}
