// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/applyconfigurations"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	fakecorev1 "k8s.io/client-go/kubernetes/typed/core/v1/fake"
	resourcev1 "k8s.io/client-go/kubernetes/typed/resource/v1"
	fakeresourcev1 "k8s.io/client-go/kubernetes/typed/resource/v1/fake"
	resourcev1beta1 "k8s.io/client-go/kubernetes/typed/resource/v1beta1"
	fakeresourcev1beta1 "k8s.io/client-go/kubernetes/typed/resource/v1beta1/fake"
	resourcev1beta2 "k8s.io/client-go/kubernetes/typed/resource/v1beta2"
	fakeresourcev1beta2 "k8s.io/client-go/kubernetes/typed/resource/v1beta2/fake"
	clienttesting "k8s.io/client-go/testing"
)

// clientset is what the driver and kubeletplugin use of client-go's fake clientset, whose
// other fifty parts take half a minute to compile, and as long again for the race detector.
type clientset struct {
	kubernetes.Interface // nil: a call of another part panics
	clienttesting.Fake
}

func newClientset(objects ...runtime.Object) *clientset {
	tracker := clienttesting.NewFieldManagedObjectTracker(scheme.Scheme, serializer.NewCodecFactory(scheme.Scheme).UniversalDecoder(),
		applyconfigurations.NewTypeConverter(scheme.Scheme))
	for _, o := range objects {
		if err := tracker.Add(o); err != nil {
			panic(err)
		}
	}
	c := &clientset{}
	c.AddReactor("*", "*", clienttesting.ObjectReaction(tracker))
	c.AddWatchReactor("*", func(a clienttesting.Action) (bool, watch.Interface, error) {
		w, err := tracker.Watch(a.GetResource(), a.GetNamespace(), a.(clienttesting.WatchActionImpl).ListOptions)
		return err == nil, w, err
	})
	return c
}

func (c *clientset) CoreV1() corev1.CoreV1Interface { return &fakecorev1.FakeCoreV1{Fake: &c.Fake} }

func (c *clientset) ResourceV1() resourcev1.ResourceV1Interface {
	return &fakeresourcev1.FakeResourceV1{Fake: &c.Fake}
}

func (c *clientset) ResourceV1beta1() resourcev1beta1.ResourceV1beta1Interface {
	return &fakeresourcev1beta1.FakeResourceV1beta1{Fake: &c.Fake}
}

func (c *clientset) ResourceV1beta2() resourcev1beta2.ResourceV1beta2Interface {
	return &fakeresourcev1beta2.FakeResourceV1beta2{Fake: &c.Fake}
}

// IsWatchListSemanticsUnSupported tells reflectors to list and then watch.
func (*clientset) IsWatchListSemanticsUnSupported() bool { return true }
