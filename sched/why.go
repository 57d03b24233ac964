// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"

	"github.com/nvshare/nvshare/sched/base"
)

// Why is a reason for the way in which clients share a GPU.
type Why uint8

const (
	reasonNone Why = iota
	reasonSet
	reasonSlices
	reasonCohort
	reasonGaps
	reasonTurns
	reasonAlone

	reasonSwap
	reasonLimit
	reasonShares
	reasonGang
	reasonOverlap
	reasonUnsliceable
	reasonBare
	reasonUnproved
	reasonLatency
	reasonBusy
	reasonUneven
	reasonMore
	reasonParts
	reasonMeasure
	reasonFew
	reasonMany
	reasonNotNeeded
)

// whys has for each Why its code, which does not change between versions, and its text.
func whys() []struct{ code, text string } {
	return []struct{ code, text string }{
		reasonNone:   {"", ""},
		reasonSet:    {"as-set", "as set"},
		reasonSlices: {"slices", "by time slices: every process can set its slice, and all memory fits"},
		reasonCohort: {"cohort", "a tenant that needs turns of its own takes turns with all others together, who share their turn by time slices"},
		reasonGaps:   {"gaps", "tenants leave the GPU idle in their turns: at the same time they get more done"},
		reasonTurns:  {"busy", "tenants keep the GPU busy: turns cost less than mixing"},
		reasonAlone:  {"alone", "at most one process uses the GPU"},

		reasonSwap:        {"memory", "more memory is reserved than the GPU has: tenants take turns, and what one lacks is moved out of the others"},
		reasonLimit:       {"core-limit", "a tenant has a core limit, which turns hold exactly"},
		reasonShares:      {"shares", "tenants have core limits or core requests, which the driver alone does not hold"},
		reasonGang:        {"gang", "a gang is granted together, which takes turns"},
		reasonOverlap:     {"group-beside-latency", "an overlap group beside a latency tenant takes turns: the slice of its MPS server cannot be shortened"},
		reasonUnsliceable: {"slices-refused", "client %d cannot be sliced: time slices: %v"},
		reasonBare:        {"slices-unseen", "client %d cannot be sliced: it has channels in no group that was seen"},
		reasonUnproved:    {"slices-unproved", "client %d cannot be sliced: its shim does not say whether time slices work"},
		reasonLatency:     {"latency", "a latency tenant beside several others: it runs beside them, and they take turns"},
		reasonBusy:        {"latency-busy", "beside a latency tenant time slices are of use only if the others leave the GPU idle"},
		reasonUneven:      {"latency-requests", "beside a latency tenant time slices are too short to hold core requests"},
		reasonMore:        {"turns-give-more", "tenants get more by turns than by slices"},
		reasonParts:       {"parts", "tenants do not get their parts by slices"},
		reasonMeasure:     {"measuring", "turns measure what each tenant gets alone"},
		reasonFew:         {"too-few", "fewer than two can share a turn"},
		reasonMany:        {"too-many", fmt.Sprintf("more than %d clients would have to be stopped together", maxCohort)},
		reasonNotNeeded:   {"not-needed", "nobody needs turns of its own"},
	}
}

// Code returns the name of the reason for programs.
func (w Why) Code() string { return whys()[w].code }

// Cause is a reason with the client that it is about.
type Cause struct {
	Why
	Client  base.ClientID // 0: it is about no single client
	Control Control       // what the driver answered that client
}

func because(w Why) Cause { return Cause{Why: w} }

func (c Cause) String() string {
	text := whys()[c.Why].text
	switch c.Why {
	case reasonUnsliceable:
		return fmt.Sprintf(text, c.Client, c.Control)
	case reasonBare, reasonUnproved:
		return fmt.Sprintf(text, c.Client)
	}
	return text
}

// WayRefusal says why clients do not share a GPU in a way that would be better.
type WayRefusal struct {
	Way string
	Cause
}

func (r WayRefusal) String() string { return r.Way + ": " + r.Code() }
