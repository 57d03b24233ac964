// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"

	tea "charm.land/bubbletea/v2"

	"github.com/nvshare/nvshare/sched/api"
)

// question is asked before something changes.
type question struct {
	text string
	yes  tea.Cmd
}

// changeKeys are the keys that change what the selected tenant may have.
var changeKeys = map[string]api.FieldSet{
	"c": api.CoreLimitField,
	"r": api.CoreRequestField,
	"w": api.WeightField,
	"m": api.MemoryLimitField,
}

// askChange begins the change that a key stands for; other keys mean nothing.
func (m *monitor) askChange(key string) {
	if len(m.lines) == 0 {
		return
	}
	l := m.lines[m.cursor()]
	where := fmt.Sprintf("%s on GPU %d", printable(api.Tenant(l.container, l.uid)), l.gpu.Index)
	if key == "z" {
		req := &api.SuspendRequest{Container: l.container.GetId(), Uid: l.user(), Gpu: l.gpu.Uuid}
		m.question = &question{"Suspend " + where + "? Its memory leaves the GPU until it calls CUDA again. y/n", func() tea.Msg {
			resp, err := m.node.suspend(req)
			return done(func() []string { return describeSuspend(resp) }, err)
		}}
		return
	}
	i := slices.IndexFunc(api.Fields, func(f api.Field) bool { return changeKeys[key] == f.ID })
	if i < 0 {
		return
	}
	field := &api.Fields[i]
	now := api.TermsOf(l.use.GetShare(), l.memory.LimitBytes)
	m.prompt = &prompt{label: fmt.Sprintf("%s of %s (now %s; a value, or none): ", field.Name, where, field.Format(now)), enter: func(text string) {
		var terms api.Terms
		if err := parseField(field, &terms, strings.TrimSpace(text)); err != nil {
			m.message = fmt.Sprintf("%s: %v", field.Name, err)
			return
		}
		req := &api.SetShareRequest{Container: l.container.GetId(), Uid: l.user(), Gpu: l.gpu.Uuid}
		req.Change(terms, field.ID)
		to := "none"
		if field.Said(terms) {
			to = field.Format(terms)
		}
		m.question = &question{fmt.Sprintf("Set the %s of %s from %s to %s? y/n", field.Name, where, field.Format(now), to), func() tea.Msg {
			resp, err := m.node.set(req)
			return done(func() []string { return describeShareChange(resp, field.ID, 0, nil) }, err)
		}}
	}}
}

// user is the user that a tenant outside containers is; nil: it is a container.
func (l line) user() *uint32 {
	if l.container.GetId() != "" {
		return nil
	}
	uid := l.uid
	return &uid
}

// done says what a change did, or why it did not.
func done(describe func() []string, err error) tea.Msg {
	if err != nil {
		return doneMsg{"not changed: " + messageOf(err)}
	}
	return doneMsg{strings.Join(describe(), "; ")}
}
