// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

func configCommand(root *rootFlags, io streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show and change how GPUs are shared",
		Long: `config shows and changes the settings that all tenants of a GPU share:

turn-length  how long a turn lasts, 1ms to 24h: 200ms, or a number of seconds
anti-thrash  on: tenants take turns; off: all run at the same time; auto: time
             slices, turns, or all at once, as suits them
swap-share   the percentage of the time, 1 to 50, that moving memory may take:
             turns of memory that was moved in become as long as that needs;
             none: they are as long as turn-length says

A value that is set holds at once and over restarts of the scheduler, until it
is reset, or until the scheduler is started with another value of the same flag
(--tq, --anti-thrash, --swap-share). A start of the machine forgets it.`,
		Example: `  nvsharectl config list
  sudo nvsharectl config set turn-length 200ms
  sudo nvsharectl config set anti-thrash on --gpu 0
  sudo nvsharectl config reset turn-length`,
		Args: noCommand,
		RunE: func(*cobra.Command, []string) error {
			return usageError{errors.New("config: say set, list or reset")}
		},
	}
	cmd.AddCommand(configSetCommand(root, io), configListCommand(root, io), configResetCommand(root, io))
	return cmd
}

func configSetCommand(root *rootFlags, io streams) *cobra.Command {
	var gpu string
	cmd := &cobra.Command{
		Use:   "set NAME VALUE",
		Short: "Change a setting of all GPUs, or of one",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) != 2 {
				return usageError{fmt.Errorf("config set: give a setting (%s) and its value", strings.Join(settingNames(), ", "))}
			}
			s, err := settingNamed(args[0])
			if err != nil {
				return err
			}
			return change(cmd.Context(), root.runDir, io, gpu, []wanted{{s, args[1], s.name}})
		},
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) (words []string, _ cobra.ShellCompDirective) {
			switch len(args) {
			case 0:
				words = settingWords(nil)
			case 1:
				if s, err := settingNamed(args[0]); err == nil {
					words = s.values
				}
			}
			return words, cobra.ShellCompDirectiveNoFileComp
		},
	}
	cmd.Flags().StringVar(&gpu, "gpu", "", "only of the GPU with this `index or UUID`")
	return cmd
}

func configResetCommand(root *rootFlags, io streams) *cobra.Command {
	var gpu string
	var all bool
	cmd := &cobra.Command{
		Use:   "reset NAME... | --all",
		Short: "Take back what was set by hand",
		Long: `reset takes back what was set by hand: what the scheduler's command line says
holds again, or the default. With --gpu it takes back what was set for that
GPU: the setting of all GPUs holds there again.`,

		DisableFlagsInUseLine: true, // --all is one

		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return usageError{fmt.Errorf("config reset: say which setting (%s), or --all", strings.Join(settingNames(), ", "))}
			}
			if all {
				args = settingNames()
			}
			return reset(cmd.Context(), root.runDir, io, gpu, args)
		},
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return settingWords(args), cobra.ShellCompDirectiveNoFileComp
		},
	}
	cmd.Flags().StringVar(&gpu, "gpu", "", "only of the GPU with this `index or UUID`")
	cmd.Flags().BoolVar(&all, "all", false, "all settings")
	return cmd
}

// settingWords are the names that complete a command line that has some.
func settingWords(have []string) (words []string) {
	for _, s := range gpuSettings {
		if !slices.Contains(have, s.name) {
			words = append(words, s.name+"\t"+s.about)
		}
	}
	return words
}

func configListCommand(root *rootFlags, io streams) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "Show each setting, where its value comes from, and who set it when",
		Args:  noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := askAll(cmd.Context(), root.runDir)
			if err != nil {
				return err
			}
			if output != "table" {
				return encode(io, output, newConfigJSON(r))
			}
			printConfig(io, r)
			return nil
		},
	}
	addForm(cmd, &output, "", "table", "json", "yaml")
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
