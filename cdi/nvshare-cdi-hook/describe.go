// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	ourAnnotations = "nvshare.com/"
	// maxShown is how many bytes of an annotation a message has.
	maxShown = 256
	// maxTold is how many bytes of a refusal the scheduler is told.
	maxTold = 512
	// maxUnknown is how many annotations without effect are named.
	maxUnknown = 8

	// As package cdi writes them: AnyMark, VisibleDevicesEnv.
	anyMark        = "NVSHARE_GPU=any"
	visibleDevices = "CUDA_VISIBLE_DEVICES"
)

// runDescribe returns the exit status, as run does.
func runDescribe(args []string, stdin io.Reader, stderr io.Writer) int {
	flags := flag.NewFlagSet("describe", flag.ContinueOnError)
	marks := map[string]string{}
	flags.Func("gpu", "UUID=MARK of a GPU; may be repeated", func(s string) error {
		uuid, mark, ok := strings.Cut(s, "=")
		if !ok || uuid == "" || mark == "" {
			return errors.New("not UUID=MARK")
		}
		marks[uuid] = mark
		return nil
	})
	return withRunDir(flags, args, stderr, timeLimit, func(runDir string) error { return describe(stdin, stderr, runDir, marks) })
}

// describe tells the scheduler of a container. A container that asks for nothing is
// described if that is possible; failures do not matter then.
func describe(stdin io.Reader, stderr io.Writer, runDir string, marks map[string]string) error {
	var s state
	var c config
	if err := s.read(stdin); err != nil {
		return err
	}
	if err := s.config(&c); err != nil {
		return err
	}
	name, container, kubernetes := engine(&s, &c)
	if kubernetes {
		return nil
	}
	terms, warnings, err := termsOf(s.Annotations)
	if err != nil { // an engine may keep for itself what a hook says, as crun does
		_ = tell(runDir, &api.DescribeContainerRequest{Pid: s.PID, Warnings: []string{fmt.Sprintf("%.*s", maxTold, "refused: "+err.Error())},
			Container: &api.Container{Id: s.ID, Name: container, Engine: name}})
		return err
	}
	for _, w := range warnings {
		fmt.Fprintf(stderr, "nvshare-cdi-hook: warning: %s\n", w)
	}
	asked := terms // by annotations: these are held, or the container is refused
	if c.has(anyMark) {
		terms.Migratable = true
	}
	req := &api.DescribeContainerRequest{Pid: s.PID, Warnings: warnings,
		Container: &api.Container{Id: s.ID, Name: container, Engine: name}}
	req.Container.SetTerms(terms)
	if terms.Overlap != "" {
		if err := c.canOverlap(terms); err != nil {
			return fmt.Errorf("annotation %s=%q: %w", api.OverlapAnnotation, terms.Overlap, err)
		}
		req.Container.Uid = c.Process.User.UID
	}
	for uuid, mark := range marks {
		if c.has(mark) {
			req.Container.Gpus = append(req.Container.Gpus, uuid)
		}
	}
	slices.Sort(req.Container.Gpus)
	if one := c.sees(req.Container.Gpus); terms.Migratable && one != "" {
		req.Container.Gpus, req.Container.Reach = []string{one}, req.Container.Gpus
		req.Choose = c.has(anyMark)
	}
	switch err := tell(runDir, req); {
	case status.Code(err) == codes.Aborted: // it may not start, whatever it asks for
		return said(err)
	case errors.Is(err, fs.ErrPermission) && asked != (api.Terms{}):
		return fmt.Errorf("annotations %s: %w; %s", strings.Join(saidBy(asked), ", "), err, ofUser(asked))
	case err != nil && asked != (api.Terms{}):
		return fmt.Errorf("annotations %s: %w", strings.Join(saidBy(asked), ", "), said(err))
	}
	return nil
}

// sees returns the one of several GPUs that the container's programs see; "": it is not one,
// or not named by its UUID.
func (c *config) sees(gpus []string) string {
	uuid, _ := c.env(visibleDevices)
	if len(gpus) < 2 || !slices.Contains(gpus, uuid) {
		return ""
	}
	return uuid
}

// said returns what the scheduler says, without what the transport adds.
func said(err error) error {
	if st, ok := status.FromError(err); ok {
		return errors.New(st.Message())
	}
	return err
}

func tell(runDir string, req *api.DescribeContainerRequest) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeLimit/2)
	defer cancel()
	conn, err := api.Dial(ctx, runDir)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.DescribeContainer(ctx, req)
	return err
}

// ofUser says what the user of a rootless container can do about terms.
func ofUser(asked api.Terms) string {
	var fixed api.Terms
	fixed.Copy(asked, api.FixedFields)
	if fixed == (api.Terms{}) {
		return "a rootless container has the limits of its user: set them with sudo nvsharectl set --user"
	}
	keys, them := saidBy(fixed), "it"
	if len(keys) > 1 {
		them = "them"
	}
	return fmt.Sprintf("a rootless container cannot have %s: leave %s out, or run the container as root", strings.Join(keys, ", "), them)
}

// termsOf reads a container's annotations. The warnings name those without effect.
func termsOf(annotations map[string]string) (t api.Terms, warnings []string, err error) {
	names := saidBy(api.Terms{})
	for _, f := range api.Fields {
		key := f.Annotation()
		value, said := annotations[key]
		if !said {
			continue
		}
		if wrong := f.Parse(&t, value); wrong != nil {
			err = errors.Join(err, fmt.Errorf("annotation %s=%.*q: %w", key, maxShown, value, wrong))
		}
	}
	if err == nil {
		err = t.Consistent()
	}
	var unknown []string
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		if !strings.HasPrefix(key, ourAnnotations) || slices.Contains(names, key) {
			continue
		}
		show := fmt.Sprintf("%.*s", maxShown, key)
		if meant := api.Misspelt(show, names); meant != "" && key != ourAnnotations+"gpu" { // this one asks for GPUs, in pods
			err = errors.Join(err, fmt.Errorf("annotation %s: unknown (did you mean %s?)", show, meant))
		}
		unknown = append(unknown, show)
	}
	if len(unknown) > 0 {
		warnings = append(warnings, fmt.Sprintf("annotations without effect: %s; those for containers of engines are %s",
			strings.Join(unknown[:min(len(unknown), maxUnknown)], ", "), strings.Join(names, ", ")))
	}
	return t, warnings, err
}

// saidBy returns the annotations that say terms; all, if there are none.
func saidBy(t api.Terms) (keys []string) {
	for _, f := range api.Fields {
		if t == (api.Terms{}) || f.Said(t) {
			keys = append(keys, f.Annotation())
		}
	}
	return keys
}
