// SPDX-License-Identifier: Apache-2.0

// Command nvshare-cdi-hook is the OCI hook that nvshare's CDI devices bring. The
// container runtime gives it the container's state on standard input.
//
//	nvshare-cdi-hook update-ldcache [--preload PATH] [--lib PATH]...
//
// makes the mounted driver libraries known to a container's dynamic linker. The
// runtime runs it at createContainer: in the container's mount namespace, before the
// root is changed, with all mounts in place. Each PATH is a library inside the
// container; its last element is the name that programs ask for. With --preload it also puts
// a library into the container's /etc/ld.so.preload.
//
//	nvshare-cdi-hook describe --run-dir DIR [--gpu UUID=MARK]...
//
// tells the scheduler the container's name and what its annotations
// nvshare.com/gpu-… ask for, before the container's program starts. The runtime runs
// it at createRuntime, in its own namespaces. A container has a GPU if it has the
// device node, or the variable of the environment, that MARK is. Where annotations
// cannot be met the exit status is 1, and the runtime refuses the container. Containers
// of Kubernetes are the plugin's.
//
//	nvshare-cdi-hook join --run-dir DIR
//
// waits until the MPS daemon of a container's overlap group runs, and mounts the group's
// directories into the container: the sockets where CUDA_MPS_PIPE_DIRECTORY says, and
// /dev/shm. The runtime runs it at createContainer, after describe. A container is in a
// group if it has the annotation nvshare.com/gpu-overlap, which the plugin writes on the
// containers of pods; the others are left alone at once. If the container cannot be in the
// group the exit status is 1, and the runtime refuses the container.
//
// The file system of the container is hostile. Nothing of it is run, and the
// host's ldconfig is not run on it: chrooted into an image whose /etc points to
// /proc/1/root/etc, it would write the host's cache. Instead the cache is
// rewritten here, through descriptors that cannot leave the container's root
// file system.
//
// A failure of update-ldcache is a warning and exit status 0, because many programs
// find the libraries without the cache.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	// timeLimit ends a hook that hangs, well before the runtime's own limit.
	timeLimit = 5 * time.Second

	usage = "usage: nvshare-cdi-hook update-ldcache [--preload PATH] [--lib PATH]...\n" +
		"       nvshare-cdi-hook describe --run-dir DIR [--gpu UUID=MARK]...\n" +
		"       nvshare-cdi-hook join --run-dir DIR"
)

func main() {
	if text := help(os.Args[1:]); text != "" {
		fmt.Println(text)
		return
	}
	os.Exit(run(os.Args[1:], os.Stdin, os.Stderr))
}

// help answers people; engines never ask.
func help(args []string) string {
	switch {
	case len(args) != 1:
	case args[0] == "-h" || args[0] == "--help":
		return "nvshare-cdi-hook is the OCI hook of nvshare's CDI devices. Container engines run it,\n" +
			"with the container's state on standard input.\n\n" + usage
	case args[0] == "-v" || args[0] == "--version":
		return "nvshare-cdi-hook version " + api.Version
	}
	return ""
}

// run returns the exit status: 0, 1 for a container that is refused, 2 for usage.
func run(args []string, stdin io.Reader, stderr io.Writer) int {
	switch {
	case len(args) > 0 && args[0] == "join":
		return runJoin(args[1:], stdin, stderr)
	case len(args) > 0 && args[0] == "describe":
		return runDescribe(args[1:], stdin, stderr)
	case len(args) == 0 || args[0] != "update-ldcache":
		fmt.Fprintln(stderr, usage)
		return 2
	}
	flags := flag.NewFlagSet("update-ldcache", flag.ContinueOnError)
	var libs []string
	var shim string
	add := func(name, usage string, to func(p string)) {
		flags.Func(name, usage, func(p string) error {
			if !path.IsAbs(p) || path.Clean(p) != p {
				return errors.New("not an absolute, clean path")
			}
			to(p)
			return nil
		})
	}
	add("lib", "path of a library in the container; may be repeated", func(p string) { libs = append(libs, p) })
	add("preload", "path of the library that all programs of the container are to load", func(p string) { shim = p })
	if !parse(flags, args[1:], stderr) {
		return 2
	}
	if err := within(timeLimit, func() error { return update(stdin, libs, shim) }); err != nil {
		fmt.Fprintf(stderr, "nvshare-cdi-hook: warning: %v; programs may not find the GPU driver's libraries, or the shim\n", err)
	}
	return 0
}

// parse tells whether the arguments of a command are flags. If not, it says what is wrong.
func parse(flags *flag.FlagSet, args []string, stderr io.Writer) bool {
	flags.SetOutput(stderr)
	if flags.Parse(args) != nil {
		return false
	}
	if flags.NArg() > 0 {
		fmt.Fprintln(stderr, usage)
		return false
	}
	return true
}

// withRunDir runs a command that has the flag --run-dir, and returns the exit status.
func withRunDir(flags *flag.FlagSet, args []string, stderr io.Writer, limit time.Duration, command func(runDir string) error) int {
	runDir := flags.String("run-dir", "", "the scheduler's run directory")
	if !parse(flags, args, stderr) {
		return 2
	}
	if *runDir == "" {
		fmt.Fprintln(stderr, usage)
		return 2
	}
	return exitStatus(within(limit, func() error { return command(*runDir) }), stderr)
}

// exitStatus says what has failed, and returns the exit status.
func exitStatus(err error, stderr io.Writer) int {
	if err == nil {
		return 0
	}
	fmt.Fprintf(stderr, "nvshare-cdi-hook: %v\n", err)
	return 1
}

func update(stdin io.Reader, libs []string, shim string) error {
	if len(libs) == 0 && shim == "" {
		return nil
	}
	var s state
	var c config
	err := s.read(stdin)
	if err == nil {
		err = s.config(&c)
	}
	if err != nil {
		return err
	}
	rootfs, err := c.rootfs(s.Bundle)
	if err != nil {
		return err
	}
	if len(libs) > 0 {
		err = updateCache(rootfs, libs)
	}
	if shim != "" {
		err = errors.Join(err, preload(rootfs, shim))
	}
	return err
}

// within returns what f does, or an error if f takes longer. The process ends then.
func within(limit time.Duration, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(limit):
		return fmt.Errorf("not done after %v", limit)
	}
}
