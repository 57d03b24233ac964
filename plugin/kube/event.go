// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/nvshare/nvshare/plugin"
)

const (
	normal  = "Normal"
	warning = "Warning"

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

func newLimit() flowcontrol.PassiveRateLimiter {
	return flowcontrol.NewTokenBucketPassiveRateLimiter(float32(1/eventEvery.Seconds()), eventBurst)
}

// event has the fields of events.k8s.io/v1 that are used. The generated types would
// add 3 MB to the program.
type event struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	EventTime           metav1.MicroTime `json:"eventTime"`
	ReportingController string           `json:"reportingController"`
	ReportingInstance   string           `json:"reportingInstance"`
	Action              string           `json:"action"`
	Reason              string           `json:"reason"`
	Regarding           regarding        `json:"regarding"`
	Note                string           `json:"note"`
	Type                string           `json:"type"`
}

type regarding struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Namespace  string `json:"namespace"`
	Name       string `json:"name"`
	UID        string `json:"uid"`
	FieldPath  string `json:"fieldPath,omitempty"`
}

// events posts events in the background. Events beyond the queue are left out.
type events struct {
	client *rest.RESTClient
	node   string
	log    logrus.FieldLogger
	queue  chan event
}

func newEvents(c *rest.Config, client *http.Client, node string, log logrus.FieldLogger) (*events, error) {
	c = rest.CopyConfig(c)
	c.NegotiatedSerializer = metainternal.Codecs.WithoutConversion() // of the errors in answers
	r, err := rest.UnversionedRESTClientForConfigAndClient(c, client)
	if err != nil {
		return nil, err
	}
	return &events{client: r, node: node, log: log, queue: make(chan event, maxWaiting)}, nil
}

// add queues an event, unless the queue is full.
func (e *events) add(p plugin.Pod, container, kind, reason, note string) {
	now := time.Now()
	ev := event{
		TypeMeta: metav1.TypeMeta{APIVersion: "events.k8s.io/v1", Kind: "Event"},
		ObjectMeta: metav1.ObjectMeta{
			Name:      fmt.Sprintf("%s.%x", strings.TrimRight(p.Name[:min(len(p.Name), maxEventName)], "-."), now.UnixNano()),
			Namespace: p.Namespace,
		},
		EventTime: metav1.NewMicroTime(now), ReportingController: "nvshare.com/plugin", ReportingInstance: e.node[:min(len(e.node), 128)],
		Action: "ShareGPU", Reason: reason, Type: kind,
		Regarding: regarding{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID},
		Note:      note,
	}
	if container != "" {
		ev.Regarding.FieldPath = "spec.containers{" + container + "}"
		ev.Note = "container " + container + ": " + note
	}
	if len(ev.Note) > maxNote {
		ev.Note = strings.ToValidUTF8(ev.Note[:maxNote-len("…")], "") + "…"
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
func (e *events) post(ctx context.Context, ev event) error {
	body, err := json.Marshal(ev)
	if err != nil {
		return err
	}
	for i := range attempts {
		if err = e.once(ctx, ev.Namespace, body); err == nil || apierrors.IsAlreadyExists(err) {
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

func (e *events) once(ctx context.Context, namespace string, body []byte) error {
	ctx, cancel := context.WithTimeout(ctx, postLimit)
	defer cancel()
	return e.client.Post().AbsPath("/apis/events.k8s.io/v1/namespaces", namespace, "events").
		SetHeader("Content-Type", "application/json").Body(body).Do(ctx).Error()
}
