// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
)

// RunCtr starts the workload image with ctr run, which uses the CDI spec but
// neither the CRI nor NRI.
func (n *Node) RunCtr(ctx context.Context, name, device string, spec ContainerSpec) (*Container, error) {
	log := filepath.Join(n.dir, "log", "ctr-"+name+".log")
	args := []string{"run", "--detach", "--net-host", "--cgroup", "/" + n.cgroup + "/" + name,
		"--log-uri", "file://" + log, "--device", device}
	for k, v := range spec.Env {
		args = append(args, "--env", k+"="+v)
	}
	if _, err := n.Ctr(ctx, append(append(args, WorkloadImage, name), spec.Args...)...); err != nil {
		return nil, err
	}
	out, err := n.Ctr(ctx, "tasks", "list")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == name {
			pid, err := strconv.Atoi(f[1])
			return &Container{Name: name, ID: name, PID: pid, log: log}, err
		}
	}
	return nil, fmt.Errorf("ctr container %s has no task: %s", name, out)
}

// RemoveCtr kills and removes a container that RunCtr started.
func (n *Node) RemoveCtr(ctx context.Context, name string) error {
	if _, err := n.Ctr(ctx, "tasks", "delete", "--force", name); err != nil {
		return err
	}
	_, err := n.Ctr(ctx, "containers", "delete", name)
	return err
}
