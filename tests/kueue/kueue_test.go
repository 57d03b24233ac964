// SPDX-License-Identifier: Apache-2.0

// Package kueue shows that Kueue's own code takes the sample in deployments/kubernetes/kueue,
// and counts the cores that its pods' claims consume. It is a module of its own, which is
// built only for that. Kueue's controller is not run: a module that it needs
// (sigs.k8s.io/scheduler-library) is not in the public checksum database.
package kueue

import (
	"context"
	"os"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/component-base/featuregate"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	configapi "sigs.k8s.io/kueue/apis/config/v1beta2"
	kueueapi "sigs.k8s.io/kueue/apis/kueue/v1beta2"
	"sigs.k8s.io/kueue/pkg/dra"
	"sigs.k8s.io/kueue/pkg/features"
	"sigs.k8s.io/yaml"

	"github.com/nvshare/nvshare/cdi"
	driver "github.com/nvshare/nvshare/plugin/dra"
)

const sample = "../../deployments/kubernetes/kueue/"

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// read decodes the documents of a file into objects, and refuses fields that they lack.
func read(t *testing.T, file string, into ...any) {
	t.Helper()
	text, err := os.ReadFile(sample + file)
	check(t, err)
	documents := strings.Split(string(text), "\n---\n")
	if len(documents) != len(into) {
		t.Fatalf("%s has %d documents, want %d", file, len(documents), len(into))
	}
	for i, d := range documents {
		if err := yaml.UnmarshalStrict([]byte(d), into[i]); err != nil {
			t.Fatalf("%s, document %d: %v", file, i+1, err)
		}
	}
}

func TestSample(t *testing.T) {
	var config configapi.Configuration
	read(t, "configuration.yaml", &config)
	var class resourceapi.DeviceClass
	var flavor kueueapi.ResourceFlavor
	var queue kueueapi.ClusterQueue
	var local kueueapi.LocalQueue
	read(t, "queues.yaml", &class, &flavor, &queue, &local)
	var template resourceapi.ResourceClaimTemplate
	var job batchv1.Job
	read(t, "job.yaml", &template, &job)

	request := template.Spec.Spec.Devices.Requests[0].Exactly // with the API server's defaults:
	request.AllocationMode, request.Count = resourceapi.DeviceAllocationModeExactCount, 1
	// Names that one object has of another.
	if string(local.Spec.ClusterQueue) != queue.Name || job.Labels["kueue.x-k8s.io/queue-name"] != local.Name || job.Namespace != local.Namespace || template.Namespace != job.Namespace {
		t.Errorf("job %s/%s, queue %s/%s of %s, template of %s", job.Namespace, job.Labels, local.Namespace, local.Name, local.Spec.ClusterQueue, template.Namespace)
	}
	if !*job.Spec.Suspend {
		t.Error("the job starts without Kueue")
	}
	quotas := map[corev1.ResourceName]int64{}
	for _, r := range queue.Spec.ResourceGroups[0].Flavors[0].Resources {
		quotas[r.Name] = r.NominalQuota.Value()
	}
	if string(queue.Spec.ResourceGroups[0].Flavors[0].Name) != flavor.Name || quotas["nvshare.com/cores"] != 800 {
		t.Errorf("quotas of flavor %s: %v", queue.Spec.ResourceGroups[0].Flavors[0].Name, quotas)
	}

	// Kueue counts what the pods' claims consume of what the driver publishes.
	for gate, on := range config.FeatureGates {
		features.SetFeatureGateDuringTest(t, featuregate.Feature(gate), on)
	}
	mapper := dra.NewResourceMapper()
	check(t, mapper.PopulateFromConfiguration(config.Resources.DeviceClassMappings))
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{resourceapi.AddToScheme, kueueapi.AddToScheme} {
		check(t, add(scheme))
	}
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "n0"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: driver.DriverName, NodeName: ptr.To("n0"), Pool: resourceapi.ResourcePool{Name: "n0", Generation: 1, ResourceSliceCount: 1},
		Devices: driver.Devices([]cdi.GPU{{UUID: "GPU-0", MemoryBytes: 80 << 30}}, func(string) bool { return true }, driver.Options{Slots: driver.DefaultSlots}),
	}}
	api := fake.NewClientBuilder().WithScheme(scheme).WithObjects(&class, &template, slice).
		WithIndex(&resourceapi.ResourceSlice{}, "spec.driver", func(o client.Object) []string { return []string{o.(*resourceapi.ResourceSlice).Spec.Driver} }).Build()
	workload := &kueueapi.Workload{ObjectMeta: metav1.ObjectMeta{Namespace: job.Namespace}, Spec: kueueapi.WorkloadSpec{
		PodSets: []kueueapi.PodSet{{Name: "main", Count: *job.Spec.Parallelism, Template: job.Spec.Template}},
	}}
	cache := dra.NewResourceSliceCache(api)
	if counted, wrong := dra.GetResourceRequestsForResourceClaimTemplates(context.Background(), api, cache, mapper, workload); len(wrong) > 0 || len(counted) > 0 {
		t.Errorf("counted as devices: %v, %v", counted, wrong)
	}
	counted, wrong := dra.DetermineCapacityResourcesForWorkload(context.Background(), api, cache, mapper, workload)
	if err := wrong.ToAggregate(); err != nil {
		t.Fatal(err)
	}
	if cores := counted["main"]["nvshare.com/cores"]; cores.Value() != 40 {
		t.Errorf("each pod counts %v, want 40 of nvshare.com/cores", counted)
	}
}
