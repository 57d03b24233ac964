// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os/user"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

func configListCommand(root *rootFlags, io streams) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "Show each setting, where its value comes from, and who set it when",
		Args:  noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(output, "table", "json", "yaml"); err != nil {
				return err
			}
			r, err := askAll(cmd.Context(), root.runDir)
			if err != nil {
				return err
			}
			if len(r.Config) == 0 {
				return errors.New("the scheduler does not list its settings: it is older than this nvsharectl")
			}
			if output != "table" {
				return encode(io, output, newConfigJSON(r))
			}
			printConfig(io, r)
			return nil
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "table", "`table|json|yaml`")
	return cmd
}

func printConfig(io streams, r *api.StatusResponse) {
	t := table{head: []string{"SETTING", "GPU", "VALUE", "FROM", "BY", "SINCE"}}
	for _, v := range r.Config {
		from := originOf(v)
		if v.Origin == api.Origin_ORIGIN_HAND {
			from = "set by hand"
		}
		by, since := authorOf(v)
		t.add(nil, v.Name, gpuOf(r, v), v.Value, from, by, since)
	}
	t.print(io)
}

// handTable shows the settings that were set by hand.
func handTable(r *api.StatusResponse) table {
	t := table{head: []string{"SET BY HAND", "GPU", "VALUE", "BY", "SINCE"}}
	for _, v := range r.Config {
		if v.Origin == api.Origin_ORIGIN_HAND {
			by, since := authorOf(v)
			t.add(nil, v.Name, gpuOf(r, v), v.Value, by, since)
		}
	}
	return t
}

// gpuOf names the GPU of a setting: by its UUID if it is not found at present.
func gpuOf(r *api.StatusResponse, v *api.ConfigValue) string {
	if v.Uuid == "" {
		return "all"
	}
	for _, g := range r.Gpus {
		if g.Uuid == v.Uuid {
			return fmt.Sprint(g.Index)
		}
	}
	return v.Uuid
}

func originOf(v *api.ConfigValue) string {
	return strings.ToLower(strings.TrimPrefix(v.Origin.String(), "ORIGIN_"))
}

// authorOf says who set something by hand, and when; "": it is not known.
func authorOf(v *api.ConfigValue) (by, since string) {
	if v.Author == nil {
		return "", ""
	}
	return userName(v.Author.Uid), time.Unix(v.Author.UnixTime, 0).Format("2006-01-02 15:04:05 MST")
}

// userName is a user as this host knows it.
func userName(uid uint32) string {
	if u, err := user.LookupId(strconv.FormatUint(uint64(uid), 10)); err == nil {
		return u.Username
	}
	return fmt.Sprintf("user %d", uid)
}

// configJSON is a setting of all GPUs, or one that was set by hand for one GPU.
type configJSON struct {
	Name   string     `json:"name"`
	GPU    string     `json:"gpu_uuid,omitempty"` // absent: all that have none of their own
	Value  string     `json:"value"`              // 200ms, auto, 10%
	Origin string     `json:"origin"`             // default, flag, hand
	UID    *uint32    `json:"uid,omitempty"`      // who set it by hand, if that is known
	Time   *time.Time `json:"time,omitempty"`     // when
}

func newConfigJSON(r *api.StatusResponse) (all []configJSON) {
	for _, v := range r.Config {
		c := configJSON{Name: v.Name, GPU: v.Uuid, Value: v.Value, Origin: originOf(v)}
		if a := v.Author; a != nil {
			t := time.Unix(a.UnixTime, 0).UTC()
			c.UID, c.Time = &a.Uid, &t
		}
		all = append(all, c)
	}
	return all
}
