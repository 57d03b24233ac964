// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// A drain may take shortTurn before it is cut: in shorter turns little work may be done. In turns
// longer than longTurn others wait for longer than their users do.
const (
	shortTurn = 10 * time.Millisecond
	longTurn  = mostSeconds * time.Second
)

// checkConfig warns of settings with which GPUs are shared badly.
func checkConfig(p *patient) (all []finding) {
	if p.status == nil || len(p.status.Config) == 0 { // of an older scheduler
		return nil
	}
	hand := 0
	for _, v := range p.status.Config {
		if v.Origin == api.Origin_ORIGIN_HAND {
			hand++
		}
		if text := badly(p.status, v); text != "" {
			all = append(all, finding{Level: warn, Text: fmt.Sprintf("%s %s (%s): %s", v.Name, v.Value, whoSaid(p.status, v), text), Fix: goBack(p.status, v)})
		}
	}
	if len(all) > 0 {
		return all
	}
	if hand == 0 {
		return found(pass, "", "nothing is set by hand")
	}
	return found(pass, "", "%s by hand (nvsharectl config list)", numbered(hand, "value is set", "values are set"))
}

// badly says what is wrong with a value; "": nothing.
func badly(r *api.StatusResponse, v *api.ConfigValue) string {
	switch v.Name {
	case api.TurnLengthSetting:
		length, err := time.ParseDuration(v.Value)
		switch {
		case err != nil:
		case length < shortTurn:
			return fmt.Sprintf("a drain may take %v, so little of such a turn may be left for work", shortTurn)
		case length > longTurn:
			return "where tenants take turns, each waits that long for every other"
		}
	case api.SwapShareSetting:
		if v.Value != api.FormatPercent(0) {
			break
		}
		for _, g := range r.Gpus {
			if g.Swap != nil && (v.Uuid == "" || v.Uuid == g.Uuid) {
				return "turns are as long as turn-length says, and moving memory may take most of the time"
			}
		}
	}
	return ""
}

// whoSaid says where a value comes from, and of which GPU it is.
func whoSaid(r *api.StatusResponse, v *api.ConfigValue) string {
	text := "a flag of the scheduler"
	if v.Origin == api.Origin_ORIGIN_HAND {
		text = "set by hand"
		if by, since := authorOf(v); by != "" {
			text += " by " + by + ", " + since
		}
	}
	if v.Uuid != "" {
		text += ", on GPU " + gpuOf(r, v)
	}
	return text
}

// goBack is the command that takes a value back.
func goBack(r *api.StatusResponse, v *api.ConfigValue) string {
	if v.Origin != api.Origin_ORIGIN_HAND {
		return "start nvshare-scheduler without that flag"
	}
	text := "nvsharectl config reset " + v.Name
	if v.Uuid != "" {
		text += " --gpu " + gpuOf(r, v)
	}
	return text
}
