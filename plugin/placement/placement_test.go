// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

const gib = 1 << 30

// gpus are n whole GPUs of 16 GiB: g0, g1, …, with these tenants.
func gpus(n int, tenants map[int][]Tenant) (devices []Device) {
	for i := range n {
		id := fmt.Sprintf("g%d", i)
		devices = append(devices, Device{UUID: id, GPU: id, Name: fmt.Sprintf("GPU %d", i), Index: i, Memory: 16 * gib, Tenants: tenants[i]})
	}
	return devices
}

func core(name string, percent uint32) Tenant { return Tenant{Name: name, Core: percent} }

func labelled(name string, l Labels) Tenant { return Tenant{Name: name, Labels: l} }

// migs are two GPUs of two MIG devices each: m0 and m1 of g0, m2 and m3 of g1.
func migs(tenants map[int][]Tenant) []Device {
	devices := gpus(4, tenants)
	for i := range devices {
		devices[i].UUID, devices[i].GPU = fmt.Sprintf("m%d", i), fmt.Sprintf("g%d", i/2)
	}
	return devices
}

func TestChoose(t *testing.T) {
	red, blue := Labels{Affinity: "red"}, Labels{Exclusion: "blue"}
	type on = map[int][]Tenant
	for name, c := range map[string]struct {
		devices []Device
		request Request
		want    string // UUIDs; empty: refused
	}{
		"the first of equals":       {gpus(3, nil), Request{Count: 1}, "g0"},
		"two are two":               {gpus(3, nil), Request{Count: 2}, "g0 g1"},
		"as many as there are":      {gpus(3, nil), Request{Count: 3}, "g0 g1 g2"},
		"more than there are":       {gpus(3, nil), Request{Count: 4}, ""},
		"none":                      {gpus(3, nil), Request{}, ""},
		"no GPU":                    {nil, Request{Count: 1}, ""},
		"MIG devices of one GPU":    {migs(nil), Request{Count: 2}, "m0 m2"},
		"are not two GPUs":          {migs(nil)[:2], Request{Count: 2}, ""},
		"nor three":                 {migs(nil), Request{Count: 3}, ""},
		"the other half of one":     {migs(on{0: {core("a", 50)}}), Request{Count: 1, Core: 60}, "m1"},
		"a part fills what is used": {gpus(2, on{1: {core("a", 40)}}), Request{Count: 1, Core: 60}, "g1"},
		"but not beyond":            {gpus(2, on{1: {core("a", 41)}}), Request{Count: 1, Core: 60}, "g0"},
		"best fit":                  {gpus(4, on{0: {core("a", 20)}, 1: {core("b", 50)}, 2: {core("c", 70)}}), Request{Count: 1, Core: 40}, "g1"},
		"then by memory": {gpus(3, on{1: {{Name: "a", Core: 50, Memory: 2 * gib}}, 2: {{Name: "b", Core: 50, Memory: 3 * gib}}}),
			Request{Count: 1, Core: 40}, "g2"},
		"used by one without a part": {gpus(2, on{1: {core("a", 0)}}), Request{Count: 1, Core: 60}, "g1"},
		"memory counts": {gpus(2, on{0: {{Name: "a", Core: 10, Memory: 10 * gib}}}),
			Request{Count: 1, Core: 40, Memory: 8 * gib}, "g1"},
		"and for all of one":    {gpus(2, on{0: {{Name: "a", Memory: 10 * gib}}}), Request{Count: 2, Memory: 8 * gib}, ""},
		"a whole one":           {gpus(2, on{0: {core("a", 1)}}), Request{Count: 1, Core: 100}, "g1"},
		"parts of two":          {gpus(3, on{1: {core("a", 40)}, 2: {core("b", 70)}}), Request{Count: 2, Core: 50}, "g0 g1"},
		"without a part: idle":  {gpus(3, on{0: {core("a", 10)}, 1: {core("b", 0)}}), Request{Count: 1}, "g2"},
		"most for each":         {gpus(2, on{0: {core("a", 0), core("b", 0)}, 1: {core("c", 60)}}), Request{Count: 1}, "g1"},
		"others live on it too": {gpus(2, on{0: {core("a", 0)}, 1: {core("b", 40)}}), Request{Count: 1}, "g1"},
		"fewest tenants":        {gpus(2, on{0: {core("a", 20), core("b", 20)}, 1: {core("c", 40)}}), Request{Count: 1}, "g1"},
		"most memory":           {gpus(2, on{0: {{Name: "a", Memory: gib}}, 1: {core("b", 0)}}), Request{Count: 1}, "g1"},
		"even if nothing is":    {gpus(1, on{0: {core("a", 100)}}), Request{Count: 1}, "g0"},
		"promised outside":      {gpus(2, on{0: {{Name: "user 1000", Core: 50, Outside: true}}}), Request{Count: 1, Core: 50}, "g0"},
		"which is in the way":   {gpus(2, on{0: {{Name: "user 1000", Core: 51, Outside: true}}}), Request{Count: 1, Core: 50}, "g1"},
		"but no neighbour":      {gpus(1, on{0: {{Name: "user 1000", Core: 1, Outside: true}}}), Request{Count: 1, Labels: blue}, "g0"},
		"promised too much":     {gpus(1, on{0: {core("a", 70), {Name: "b", Core: 70, Memory: 20 * gib}}}), Request{Count: 1, Core: 1}, ""},
		"what it had":           {gpus(3, on{1: {core("a", 40)}}), Request{Count: 1, Core: 20, Had: []string{"g2"}}, "g2"},
		"if that can take it":   {gpus(3, on{1: {core("a", 90)}}), Request{Count: 1, Core: 20, Had: []string{"g1"}}, "g0"},
		"and one more":          {gpus(3, nil), Request{Count: 2, Had: []string{"g2"}}, "g0 g2"},

		"affinity: with its like":           {gpus(3, on{1: {labelled("a", red)}, 2: {core("b", 10)}}), Request{Count: 1, Labels: red}, "g1"},
		"or idle":                           {gpus(3, on{0: {core("a", 10)}, 1: {labelled("b", Labels{Affinity: "green"})}}), Request{Count: 1, Labels: red}, "g2"},
		"also if its like are full":         {gpus(3, on{0: {{Name: "a", Core: 90, Labels: red}}}), Request{Count: 1, Core: 20, Labels: red}, "g1"},
		"not with others":                   {gpus(1, on{0: {core("a", 10)}}), Request{Count: 1, Labels: red}, ""},
		"others may come":                   {gpus(1, on{0: {labelled("a", red)}}), Request{Count: 1}, "g0"},
		"anti-affinity: not with its like":  {gpus(2, on{0: {labelled("a", Labels{AntiAffinity: "x"})}}), Request{Count: 1, Core: 1, Labels: Labels{AntiAffinity: "x"}}, "g1"},
		"anti-affinity: with others":        {gpus(2, on{0: {labelled("a", Labels{AntiAffinity: "y"})}}), Request{Count: 1, Core: 1, Labels: Labels{AntiAffinity: "x"}}, "g0"},
		"anti-affinity: nowhere":            {gpus(1, on{0: {labelled("a", Labels{AntiAffinity: "x"})}}), Request{Count: 1, Labels: Labels{AntiAffinity: "x"}}, ""},
		"exclusion: with its like":          {gpus(2, on{1: {labelled("a", blue)}}), Request{Count: 1, Core: 1, Labels: blue}, "g1"},
		"exclusion: not with others":        {gpus(2, on{0: {core("a", 1)}}), Request{Count: 1, Core: 1, Labels: blue}, "g1"},
		"exclusion: nor others with it":     {gpus(2, on{0: {labelled("a", blue)}}), Request{Count: 1, Core: 1}, "g1"},
		"exclusion: another":                {gpus(1, on{0: {labelled("a", blue)}}), Request{Count: 1, Labels: Labels{Exclusion: "green"}}, ""},
		"exclusion: of MIG devices":         {migs(on{0: {labelled("a", blue)}})[:2], Request{Count: 1, Core: 1}, "m1"},
		"labels of different kinds differ":  {gpus(1, on{0: {labelled("a", Labels{AntiAffinity: "x"})}}), Request{Count: 1, Labels: Labels{AntiAffinity: "y"}}, "g0"},
		"memory that is not known":          {[]Device{{UUID: "g0", GPU: "g0", Tenants: []Tenant{{Memory: 99 * gib}}}}, Request{Count: 1, Memory: 99 * gib}, "g0"},
		"affinity, for a part of an idle 1": {gpus(2, on{0: {core("a", 0)}}), Request{Count: 1, Core: 5, Labels: red}, "g1"},
	} {
		got, err := Choose(c.devices, c.request)
		if strings.Join(got, " ") != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%s: got %v, %v; want %q", name, got, err, c.want)
		}
		slices.Reverse(c.devices)
		if again, _ := Choose(c.devices, c.request); !slices.Equal(got, again) {
			t.Errorf("%s: in another order: %v, first %v", name, again, got)
		}
	}
}

// A refusal has the figures of each GPU, and says what is in the way.
func TestRefusal(t *testing.T) {
	devices := gpus(3, map[int][]Tenant{
		0: {{Name: "ml/a/main", Core: 50, Memory: 4 * gib}, core("ml/b/main", 20), core("ml/c/main", 0)},
		1: {{Name: "ml/d/main", Memory: 12*gib + 1}, {Name: "user 1000", Core: 5, Outside: true}},
		2: {{Name: "prod/e/main", Labels: Labels{Exclusion: "prod/blue"}}},
	})
	for want, r := range map[string]Request{
		"no GPU can give it 40 % and 8Gi" +
			"; GPU 0 has 30 % and 12Gi of 16Gi left (ml/a/main has 50 % and 4Gi, ml/b/main has 20 %): too little time" +
			"; GPU 1 has 95 % and 4095Mi of 16Gi left (user 1000 has 5 %, ml/d/main has 12Gi): too little memory" +
			`; GPU 2 has 100 % and 16Gi of 16Gi left: it is only for exclusion label "prod/blue", which prod/e/main has`: {Count: 1, Core: 40, Memory: 8 * gib},
		"3 different GPUs are asked for; 2 can take it" +
			`; GPU 2 has 100 % and 16Gi of 16Gi left: it is only for exclusion label "prod/blue", which prod/e/main has`: {Count: 3},
		"2 different GPUs are asked for, with 96 % of each; 0 can give that" +
			"; GPU 0 has 30 % and 12Gi of 16Gi left (ml/a/main has 50 % and 4Gi, ml/b/main has 20 %): too little time, ml/a/main is there without exclusion label \"prod/blue\"" +
			"; GPU 1 has 95 % and 4095Mi of 16Gi left (user 1000 has 5 %, ml/d/main has 12Gi): too little time, ml/d/main is there without exclusion label \"prod/blue\"" +
			`; GPU 2 has 100 % and 16Gi of 16Gi left: prod/e/main has the same anti-affinity label "x"`: {Count: 2, Core: 96, Labels: Labels{Exclusion: "prod/blue", AntiAffinity: "x"}},
		"4 different GPUs are asked for, and this node has 3": {Count: 4, Core: 1},
		"no GPU can take it" +
			"; GPU 0 has 30 % and 12Gi of 16Gi left (ml/a/main has 50 % and 4Gi, ml/b/main has 20 %): it is in use, by nobody with affinity label \"red\"" +
			"; GPU 1 has 95 % and 4095Mi of 16Gi left (user 1000 has 5 %, ml/d/main has 12Gi): it is in use, by nobody with affinity label \"red\"" +
			`; GPU 2 has 100 % and 16Gi of 16Gi left: it is only for exclusion label "prod/blue", which prod/e/main has`: {Count: 1, Labels: Labels{Affinity: "red"}},
	} {
		devices[2].Tenants[0].AntiAffinity = r.AntiAffinity
		_, err := Choose(devices, r)
		if fmt.Sprint(err) != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
		if refusal := (*Refusal)(nil); !errors.As(err, &refusal) {
			t.Errorf("a %T", err)
		}
	}
	if _, err := Choose(nil, Request{Count: 1}); fmt.Sprint(err) != "this node has no GPU" {
		t.Error(err)
	}
}

// Names come from others: what is said of them is short.
func TestRefusalIsShort(t *testing.T) {
	var tenants []Tenant
	for i := range 100 {
		tenants = append(tenants, Tenant{Name: strings.Repeat("x", 10<<10), Core: 1, Labels: Labels{AntiAffinity: strings.Repeat("y", 10<<10)}, Memory: uint64(i)})
	}
	devices := gpus(64, nil)
	for i := range devices {
		devices[i].Tenants = tenants
	}
	_, err := Choose(devices, Request{Count: 1, Core: 1, Labels: tenants[0].Labels})
	if n := len(fmt.Sprint(err)); n < 1000 || n > 32<<10 || !strings.Contains(err.Error(), "92 more have the rest") || !strings.HasSuffix(err.Error(), "; 48 more can't") {
		t.Errorf("an error of %d bytes: %.2000v", n, err)
	}
}
