// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/nvshare/nvshare/tests/node"
)

// patience bounds a run. It does not measure speed.
const patience = 20 * time.Minute

// setup says what a run is.
type setup struct {
	Nodes   int    `json:"nodes"`
	Pods    int    `json:"pods"`
	Profile string `json:"profile"` // best-fit, spread (the same with default scores) or stock (no settings at all)
	Seed    int64  `json:"seed"`
	GOGC    string `json:"gogc"` // of the control plane: memory for processor time
}

func main() {
	var s setup
	build := flag.String("build", ".build", "directory with tools-k8s")
	profile := flag.String("scheduler-config", "deployments/kubernetes/scheduler/best-fit.yaml", "the configuration that nvshare ships")
	out := flag.String("out", "tests/kubernetes/scale/results", "directory for the results")
	name := flag.String("name", "", "base name of the results; empty: from the other options")
	only := flag.Bool("report", false, "draw the results in --out, write their table into the README above it, and run nothing")
	flag.IntVar(&s.Nodes, "nodes", 1250, "nodes, of eight GPUs each")
	flag.IntVar(&s.Pods, "pods", 4000, "pods, each with a part of one GPU")
	flag.StringVar(&s.Profile, "profile", "best-fit", "best-fit, spread or stock")
	flag.StringVar(&s.GOGC, "gogc", "", "GOGC of the control plane")
	flag.Int64Var(&s.Seed, "seed", 1, "of the pods' sizes")
	flag.Parse()
	for _, p := range []*string{build, profile, out} {
		abs, err := filepath.Abs(*p)
		if err != nil {
			fail(err)
		}
		*p = abs
	}
	if *only {
		fail(report(*out))
		return
	}
	if *name == "" {
		*name = fmt.Sprintf("%s-%d-nodes", s.Profile, s.Nodes)
	}
	os.Exit(node.IsolatedCluster(*build, "scale-", func(dir string) int {
		if err := measure(dir, *build, *profile, filepath.Join(*out, *name), s); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}))
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// measure brings a cluster up, places the pods, and writes what was seen to out.json and
// out.csv.
func measure(dir, build, profile, out string, s setup) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	n, err := node.New(dir, node.Options{Build: build})
	if err != nil {
		return err
	}
	cluster, err := n.NewKubernetes(ctx)
	if err != nil {
		return err
	}
	config := filepath.Join(dir, "scheduler.yaml")
	if err := writeSchedulerConfig(profile, config, s.Profile, cluster.Kubeconfig("scheduler")); err != nil {
		return err
	}
	cluster.Args = map[string][]string{
		"kube-scheduler": {"--config=" + config},
		// Nobody sends a sign of life of faked nodes, so the other controllers stay off.
		"kube-controller-manager": {"--controllers=resourceclaim-controller,serviceaccount-controller", "--kube-api-qps=1000", "--kube-api-burst=2000"},
	}
	if s.GOGC != "" {
		cluster.Env = []string{"GOGC=" + s.GOGC}
	}
	if err := cluster.StartControlPlane(ctx); err != nil {
		return err
	}
	rest, err := clientcmd.BuildConfigFromFlags("", cluster.Kubeconfig("admin"))
	if err != nil {
		return err
	}
	rest.QPS = -1 // no limit
	rest.ContentType = runtime.ContentTypeProtobuf
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return err
	}
	asks := mix(s)
	if err := populate(ctx, client, s, asks); err != nil {
		return fmt.Errorf("make the cluster: %w", err)
	}
	r, err := place(ctx, client, cluster.ControlPlane(), s, asks)
	if err != nil {
		return err
	}
	r.Audit, err = audit(ctx, client, asks, r.placed)
	if err != nil {
		return err
	}
	r.Bound = bound(asks)
	return r.write(out)
}
