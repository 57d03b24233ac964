// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand"
	"os"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin/dra"
	"github.com/nvshare/nvshare/tests/node"
)

const (
	namespace  = "default"
	gpusOfNode = 8
	gpuMemory  = 80 << 30
	writers    = 32 // concurrent requests of this program
)

// ask is what a pod wants of one GPU.
type ask struct {
	Cores  int64 // percent
	Memory int64 // bytes
}

func (a ask) template() string { return fmt.Sprintf("cores-%d-mib-%d", a.Cores, a.Memory>>20) }

// mix returns the pods' sizes: small parts are frequent, whole GPUs are rare, and pods
// want less memory than their part of the time, as much, or more.
func mix(s setup) []ask {
	r := rand.New(rand.NewSource(s.Seed))
	var kinds []int64
	for cores, times := range map[int64]int{10: 20, 20: 20, 25: 15, 30: 10, 40: 10, 50: 10, 60: 5, 70: 4, 80: 3, 100: 3} {
		for range times {
			kinds = append(kinds, cores)
		}
	}
	sortInts(kinds) // a map has no order
	asks := make([]ask, s.Pods)
	for i := range asks {
		cores := kinds[r.Intn(len(kinds))]
		memory := min(cores*[]int64{50, 100, 150}[r.Intn(3)]/100, 100) * gpuMemory / 100
		asks[i] = ask{cores, memory >> 26 << 26}
	}
	return asks
}

// writeSchedulerConfig writes the shipped configuration for this cluster; other profiles
// leave out parts of it.
func writeSchedulerConfig(from, to, profile, kubeconfig string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	var c map[string]any
	if err := yaml.Unmarshal(text, &c); err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	only := c["profiles"].([]any)[0].(map[string]any)
	switch profile {
	case "best-fit":
	case "spread":
		delete(only, "plugins")
		delete(only, "pluginConfig")
	case "stock":
		delete(c, "profiles")
		c["clientConnection"] = map[string]any{}
	default:
		return fmt.Errorf("no profile %q", profile)
	}
	c["clientConnection"].(map[string]any)["kubeconfig"] = kubeconfig
	c["leaderElection"] = map[string]any{"leaderElect": false}
	if text, err = yaml.Marshal(c); err != nil {
		return err
	}
	return os.WriteFile(to, text, 0o644)
}

// each runs f for 0 to n-1, some at the same time.
func each(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := range n {
		g.Go(func() error { return f(ctx, i) })
	}
	return g.Wait()
}

// populate makes nodes, what the driver would publish on them, the class, and a template
// for each size.
func populate(ctx context.Context, c kubernetes.Interface, s setup, asks []ask) error {
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: dra.DriverName}, Spec: resourceapi.DeviceClassSpec{
		ExtendedResourceName: ptr.To("nvshare.com/gpu"),
		Selectors:            []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf("device.driver == %q", dra.DriverName)}}},
	}}
	if _, err := c.ResourceV1().DeviceClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
		return err
	}
	if err := each(ctx, s.Nodes, func(ctx context.Context, i int) error { return addNode(ctx, c, i) }); err != nil {
		return err
	}
	templates := map[string]ask{}
	for _, a := range asks {
		templates[a.template()] = a
	}
	for name, a := range templates {
		t := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceClaimTemplateSpec{
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
				Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: dra.DriverName, Capacity: &resourceapi.CapacityRequirements{
					Requests: map[resourceapi.QualifiedName]resource.Quantity{
						dra.Cores: *resource.NewQuantity(a.Cores, resource.DecimalSI), dra.Memory: *resource.NewQuantity(a.Memory, resource.BinarySI),
					},
				}},
			}}}},
		}}
		if _, err := c.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, t, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return node.Until(ctx, "the service account of pods", func() error {
		_, err := c.CoreV1().ServiceAccounts(namespace).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
}

func addNode(ctx context.Context, c kubernetes.Interface, i int) error {
	name := fmt.Sprintf("node-%04d", i)
	has := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("512Gi"), corev1.ResourcePods: resource.MustParse("110"),
	}
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}},
		Status: corev1.NodeStatus{Capacity: has, Allocatable: has, Conditions: []corev1.NodeCondition{
			{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()},
		}},
	}
	made, err := c.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	// The API server taints new nodes; the controller that would remove the taint is off.
	for {
		made.Spec.Taints = nil
		if _, err = c.CoreV1().Nodes().Update(ctx, made, metav1.UpdateOptions{}); err == nil {
			break
		}
		if !apierrors.IsConflict(err) {
			return err
		}
		if made, err = c.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
	}
	var gpus []cdi.GPU
	for g := range gpusOfNode {
		gpus = append(gpus, cdi.GPU{Index: g, UUID: fmt.Sprintf("GPU-%08x-0000-4000-8000-%012x", i, g), Name: "NVIDIA H100 80GB HBM3", MemoryBytes: gpuMemory,
			PCIBusID: fmt.Sprintf("0000:%02x:00.0", 0x10+g), Model: cdi.Model{Brand: "Nvidia", Architecture: "Hopper", ComputeCapability: "9.0", DriverVersion: "580.95.05", CUDAVersion: "13.0"}})
	}
	_, err = c.ResourceV1().ResourceSlices().Create(ctx, &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name + "-nvshare.com"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: dra.DriverName, NodeName: &name, Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1},
			Devices: dra.Devices(gpus, func(string) bool { return true }, dra.Options{Slots: dra.DefaultSlots, PromiseMemory: 100}),
		},
	}, metav1.CreateOptions{})
	return err
}

// podOf asks for processors and memory as pods with GPUs do; best fit goes by these.
func podOf(i int, a ask) *corev1.Pod {
	wants := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceMemory: resource.MustParse("8Gi")}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: podName(i)},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false),
			ResourceClaims:               []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To(a.template())}},
			Containers: []corev1.Container{{Name: "main", Image: "none", Resources: corev1.ResourceRequirements{
				Requests: wants, Claims: []corev1.ResourceClaim{{Name: "gpu"}},
			}}},
		},
	}
}

func podName(i int) string { return fmt.Sprintf("pod-%04d", i) }
