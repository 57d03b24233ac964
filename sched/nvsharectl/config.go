// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
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
(--tq, --anti-thrash, --swap-share); for one GPU (--gpu), until it is reset. A
start of the machine forgets it.`,
		Example: `  nvsharectl config list
  sudo nvsharectl config set turn-length 200ms
  sudo nvsharectl config set anti-thrash on --gpu 0
  sudo nvsharectl config reset turn-length`,
		Args: noCommand,
		RunE: func(*cobra.Command, []string) error {
			return usageError{errors.New("config: give a subcommand: set, list or reset")}
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
				return encode(io, output, plainStatus(r)["config"])
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
		from := word(v.Origin)
		if v.Origin == api.Origin_ORIGIN_HAND {
			from = "set by hand"
		}
		by, since := authorOf(v)
		t.add(nil, v.Name, gpuOf(r, v.Uuid), v.Value, from, by, since)
	}
	t.print(io)
}

// handTable shows the settings that were set by hand.
func handTable(r *api.StatusResponse) table {
	t := table{head: []string{"SET BY HAND", "GPU", "VALUE", "BY", "SINCE"}}
	for _, v := range r.Config {
		if v.Origin == api.Origin_ORIGIN_HAND {
			by, since := authorOf(v)
			t.add(nil, v.Name, gpuOf(r, v.Uuid), v.Value, by, since)
		}
	}
	return t
}

// gpuOf names the GPU of a setting: by its UUID if it is not found at present.
func gpuOf(r *api.StatusResponse, uuid string) string {
	if uuid == "" {
		return "all"
	}
	for _, g := range r.Gpus {
		if g.Uuid == uuid {
			return fmt.Sprint(g.Index)
		}
	}
	return uuid
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

// gpuSetting is what nvsharectl config changes: how all tenants of a GPU share it.
type gpuSetting struct {
	name   string
	about  string   // for completion
	values []string // for completion
	set    func(req *api.SetRequest, text string) error
	means  map[string]string // what a value does; nil: it says that itself
}

var gpuSettings = []gpuSetting{
	{
		name: api.TurnLengthSetting, about: "how long a turn lasts", values: []string{"100ms"},
		set: func(req *api.SetRequest, text string) error {
			d, err := api.ParseDuration(text)
			req.QuantumNs = int64(d)
			return err
		},
	},
	{
		name: api.AntiThrashSetting, about: "whether tenants take turns", values: []string{"on", "off", "auto"},
		set: func(req *api.SetRequest, text string) (err error) {
			req.Mode, err = api.ParseAntiThrash(text)
			return err
		},
		means: map[string]string{
			"on":   "take turns",
			"off":  "run at the same time",
			"auto": "share by time slices, by turns, or all at the same time, as suits them",
		},
	},
	{
		name: api.SwapShareSetting, about: "percentage of the time that moving memory may take", values: []string{"10", "none"},
		set: func(req *api.SetRequest, text string) error {
			n, err := api.ParseSwapShare(text)
			req.SwapShare = &n
			return err
		},
	},
}

func settingNames() (names []string) {
	for _, s := range gpuSettings {
		names = append(names, s.name)
	}
	return names
}

func settingNamed(name string) (*gpuSetting, error) {
	for i := range gpuSettings {
		if gpuSettings[i].name == name {
			return &gpuSettings[i], nil
		}
	}
	names := settingNames()
	return nil, usageError{fmt.Errorf("%q is no setting%s: there are %s", name, suggestion(name, names), strings.Join(names, ", "))}
}

// setFlags are the settings that the original nvsharectl has as flags of the root command.
type setFlags struct {
	quantum, antiThrash, gpu string
}

func (f *setFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVarP(&f.quantum, "set-tq", "T", "", "as config set turn-length: `n` seconds, or with a unit, like 200ms")
	fs.StringVarP(&f.antiThrash, "anti-thrash", "S", "", "as config set anti-thrash `on|off|auto`")
	fs.StringVar(&f.gpu, "gpu", "", "change, or show, only the GPU with this `index or UUID`")
}

func (f *setFlags) given(cmd *cobra.Command) bool {
	return cmd.Flags().Changed("set-tq") || cmd.Flags().Changed("anti-thrash")
}

func (f *setFlags) run(cmd *cobra.Command, runDir string, io streams) error {
	var all []wanted
	for _, flag := range []struct{ name, setting, text string }{
		{"set-tq", api.TurnLengthSetting, f.quantum}, {"anti-thrash", api.AntiThrashSetting, f.antiThrash},
	} {
		if cmd.Flags().Changed(flag.name) {
			s, err := settingNamed(flag.setting)
			if err != nil {
				return err
			}
			all = append(all, wanted{s, flag.text, "--" + flag.name})
		}
	}
	return change(cmd.Context(), runDir, io, f.gpu, all)
}

// wanted is a value that somebody wants a setting to have.
type wanted struct {
	*gpuSetting
	text string
	said string // how, for errors
}

// change sets values, and prints what that did and how to take it back. gpu is "" for all.
func change(ctx context.Context, runDir string, io streams, gpu string, all []wanted) error {
	req := &api.SetRequest{Gpu: gpu}
	for _, w := range all {
		if w.text == "" {
			return usageError{fmt.Errorf("%s has no value: give one, like %s %s", w.said, w.said, w.values[0])}
		}
		if err := w.set(req, w.text); err != nil {
			return usageError{fmt.Errorf("%s: %w", w.said, err)}
		}
	}
	resp, err := ask(ctx, runDir, (*api.Conn).Set, req)
	if err != nil {
		return err
	}
	only := ""
	if gpu != "" {
		only = " --gpu " + gpu
	}
	for _, w := range all {
		back := fmt.Sprintf(", over restarts too; `nvsharectl config reset %s%s` undoes it", w.name, only)
		for _, line := range w.describe(resp.Changes, back) {
			fmt.Fprintln(io.out, line)
		}
	}
	return nil
}

// reset takes back what was set, and prints what holds again.
func reset(ctx context.Context, runDir string, io streams, gpu string, names []string) error {
	var all []*gpuSetting
	for _, name := range names {
		s, err := settingNamed(name)
		if err != nil {
			return err
		}
		all = append(all, s)
	}
	resp, err := ask(ctx, runDir, (*api.Conn).Set, &api.SetRequest{Gpu: gpu, Unset: names})
	if err != nil {
		return err
	}
	for _, s := range all {
		for _, line := range s.describe(resp.Changes, "") {
			fmt.Fprintln(io.out, line)
		}
	}
	return nil
}

// describe says what became of a setting: in one line if it is the same of all GPUs. after is
// said of a change.
func (s *gpuSetting) describe(changes []*api.Change, after string) (lines []string) {
	changes = slices.DeleteFunc(slices.Clone(changes), func(c *api.Change) bool { return c.Name != s.name })
	if len(changes) == 0 {
		return nil
	}
	first := changes[0]
	switch same := !slices.ContainsFunc(changes, func(c *api.Change) bool { return c.Old != first.Old || c.New != first.New }); {
	case same && first.Old == first.New:
		return []string{fmt.Sprintf("%s%s is %s already: nothing has changed", place(changes), s.name, first.New)}
	case same:
		return []string{place(changes) + s.line(first, after)}
	}
	for _, c := range changes {
		if c.Old != c.New {
			lines = append(lines, place([]*api.Change{c})+s.line(c, after))
		}
	}
	return lines
}

func (s *gpuSetting) line(c *api.Change, after string) string {
	line := fmt.Sprintf("%s %s → %s", s.name, c.Old, c.New)
	if means := s.means[c.New]; means != "" {
		line += " (tenants " + means + ")"
	}
	return line + after
}

// place says of which GPUs changes are: of all if there are several.
func place(changes []*api.Change) string {
	switch {
	case len(changes) > 1:
		return ""
	case changes[0].Uuid == "":
		return "GPUs found later: "
	}
	return fmt.Sprintf("GPU %d: ", changes[0].Index)
}
