//go:build tools

// SPDX-License-Identifier: Apache-2.0

package main

// Pods' networks, by the CNI plugins that everybody uses.
import (
	_ "github.com/containernetworking/plugins/plugins/ipam/host-local"
	_ "github.com/containernetworking/plugins/plugins/main/bridge"
	_ "github.com/containernetworking/plugins/plugins/main/loopback"
)
