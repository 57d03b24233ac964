// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/nvshare/nvshare/plugin"
)

const (
	normal  = corev1.EventTypeNormal
	warning = corev1.EventTypeWarning

	// eventBurst and eventEvery bound the events of one pod, because everybody who may
	// annotate the pod can cause them.
	eventBurst = 10
	eventEvery = 30 * time.Second
	// maxWaiting is how many events wait while the API server is slow.
	maxWaiting = 256
	// maxNote is the API server's limit for a note, bytes.
	maxNote = 1024
	// maxEventName leaves room in an event's name for the time.
	maxEventName = 220
	postLimit    = 10 * time.Second
	attempts     = 4
)

// events posts events in the background. Events beyond the queue are left out.
type events struct {
	client *kubernetes.Clientset
	node   string
	log    logrus.FieldLogger
	queue  chan *eventsv1.Event
}

// add queues an event, unless the queue is full.
func (e *events) add(p plugin.Pod, container, kind, reason, note string) {
	now := time.Now()
	if container != "" {
		note = "container " + container + ": " + note
	}
	if len(note) > maxNote {
		note = strings.ToValidUTF8(note[:maxNote-len("…")], "") + "…"
	}
	ev := &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Name:      fmt.Sprintf("%s.%x", strings.TrimRight(p.Name[:min(len(p.Name), maxEventName)], "-."), now.UnixNano()),
			Namespace: p.Namespace,
		},
		EventTime: metav1.NewMicroTime(now), ReportingController: "nvshare.com/plugin", ReportingInstance: e.node[:min(len(e.node), 128)],
		Action: "ShareGPU", Reason: reason, Type: kind,
		Regarding: corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID)},
		Note:      note,
	}
	select {
	case e.queue <- ev:
	default:
		e.log.Debugf("event on pod %s/%s left out: %d wait already", p.Namespace, p.Name, maxWaiting)
	}
}

// run posts events until ctx ends.
func (e *events) run(ctx context.Context) {
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case ev := <-e.queue:
			err := e.post(ctx, ev)
			switch {
			case err == nil:
				said = ""
			case ctx.Err() == nil && said != err.Error(): // not for each of them
				said = err.Error()
				e.log.Warnf("Kubernetes API: event on pod %s/%s: %v", ev.Namespace, ev.Regarding.Name, err)
			}
		}
	}
}

// post posts an event, and tries again unless the API server refuses it.
func (e *events) post(ctx context.Context, ev *eventsv1.Event) (err error) {
	for i := range attempts {
		limited, cancel := context.WithTimeout(ctx, postLimit)
		_, err = e.client.EventsV1().Events(ev.Namespace).Create(limited, ev, metav1.CreateOptions{})
		if cancel(); err == nil || apierrors.IsAlreadyExists(err) {
			return nil
		}
		if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second << i):
		}
	}
	return err
}
