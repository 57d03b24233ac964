// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
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
             turns of memory that was moved in become as long as that needs; none:
             they are as long as turn-length says

A value that is set holds at once and over restarts of the scheduler, until it is
reset, or until the scheduler is started with another value of the same flag (--tq,
--anti-thrash, --swap-share). A start of the machine forgets it.`,
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
		Long: `reset takes back what was set by hand: what the scheduler's command line says holds again,
or the default. With --gpu it takes back what was set for that GPU: the setting of all
GPUs holds there again.`,

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
