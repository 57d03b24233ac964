//go:build tools

// Package tools pins a containerd that drops the CDI devices of NRI plugins.
package tools

import (
	_ "github.com/containerd/containerd/cmd/containerd"
	_ "github.com/containerd/containerd/cmd/containerd-shim-runc-v2"
)
