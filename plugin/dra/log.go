// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"

	"github.com/go-logr/logr/funcr"
	"github.com/sirupsen/logrus"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/klog/v2"
)

// quiet has the libraries log to log, at its level debug.
func quiet(ctx context.Context, log logrus.FieldLogger) context.Context {
	return klog.NewContext(ctx, funcr.New(func(prefix, args string) { log.Debug(prefix, args) }, funcr.Options{}))
}

func equal(a, b resourceapi.Device) bool { return equality.Semantic.DeepEqual(a, b) }
