// SPDX-License-Identifier: Apache-2.0

// Command nvshare-cdi-hook is the OCI hook that nvshare's CDI devices bring: it
// makes the mounted driver libraries known to a container's dynamic linker.
//
//	nvshare-cdi-hook update-ldcache [--strict] [--lib PATH]...
//
// The runtime runs it at createContainer: in the container's mount namespace,
// before the root is changed, with all mounts in place and the container's
// state on standard input. Each PATH is a library inside the container; its
// last element is the name that programs ask for.
//
// The file system of the container is hostile. Nothing of it is run, and the
// host's ldconfig is not run on it: chrooted into an image whose /etc points to
// /proc/1/root/etc, it would write the host's cache. Instead the cache is
// rewritten here, through descriptors that cannot leave the container's root
// file system.
//
// A failure is a warning and exit status 0, because many programs find the
// libraries without the cache; with --strict it is exit status 1.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"time"
)

const (
	// timeLimit ends a hook that hangs, well before the runtime's own limit.
	timeLimit = 5 * time.Second

	maxInput = 16 << 20 // bytes of state and of config.json
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stderr))
}

// run returns the exit status: 0, 1 for a failure under --strict, 2 for usage.
func run(args []string, stdin io.Reader, stderr io.Writer) int {
	const usage = "usage: nvshare-cdi-hook update-ldcache [--strict] [--lib PATH]..."
	if len(args) == 0 || args[0] != "update-ldcache" {
		fmt.Fprintln(stderr, usage)
		return 2
	}
	flags := flag.NewFlagSet("update-ldcache", flag.ContinueOnError)
	flags.SetOutput(stderr)
	strict := flags.Bool("strict", false, "fail the container if the cache can't be updated")
	var libs []string
	flags.Func("lib", "path of a library in the container; may be repeated", func(p string) error {
		if !path.IsAbs(p) || path.Clean(p) != p {
			return errors.New("not an absolute, clean path")
		}
		libs = append(libs, p)
		return nil
	})
	if err := flags.Parse(args[1:]); err != nil {
		return 2
	}
	if flags.NArg() > 0 {
		fmt.Fprintln(stderr, usage)
		return 2
	}

	done := make(chan error, 1)
	go func() { done <- update(stdin, libs) }()
	var err error
	select {
	case err = <-done:
	case <-time.After(timeLimit):
		err = fmt.Errorf("not done after %v", timeLimit)
	}
	switch {
	case err == nil:
		return 0
	case *strict:
		fmt.Fprintf(stderr, "nvshare-cdi-hook: %v\n", err)
		return 1
	}
	fmt.Fprintf(stderr, "nvshare-cdi-hook: warning: %v; programs may not find the GPU driver's libraries by name\n", err)
	return 0
}

func update(stdin io.Reader, libs []string) error {
	if len(libs) == 0 {
		return nil
	}
	rootfs, err := rootOf(stdin)
	if err != nil {
		return err
	}
	return updateCache(rootfs, libs)
}

// rootOf returns the root file system of the container whose OCI state is read
// from stdin.
func rootOf(stdin io.Reader) (string, error) {
	var state struct {
		Bundle string `json:"bundle"`
	}
	if err := json.NewDecoder(io.LimitReader(stdin, maxInput)).Decode(&state); err != nil {
		return "", fmt.Errorf("read the container's state from standard input: %w", err)
	}
	if !filepath.IsAbs(state.Bundle) {
		return "", fmt.Errorf("the container's state names no bundle directory (%q)", state.Bundle)
	}
	file := filepath.Join(state.Bundle, "config.json")
	f, err := os.Open(file)
	if err != nil {
		return "", fmt.Errorf("read the container's configuration: %w", err)
	}
	defer f.Close()
	var config struct {
		Root struct {
			Path string `json:"path"`
		} `json:"root"`
	}
	if err := json.NewDecoder(io.LimitReader(f, maxInput)).Decode(&config); err != nil {
		return "", fmt.Errorf("read the container's configuration %s: %w", file, err)
	}
	root := config.Root.Path
	if root == "" {
		return "", fmt.Errorf("%s names no root file system", file)
	}
	if !filepath.IsAbs(root) {
		root = filepath.Join(state.Bundle, root)
	}
	if root = filepath.Clean(root); root == "/" {
		return "", fmt.Errorf("%s names the host's own root file system: leaving it alone", file)
	}
	return root, nil
}
