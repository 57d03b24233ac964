// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// The admission policy and the documentation have the keys that
// the driver knows: each field of api.Fields, and no other.
func TestPolicyKnowsEveryKey(t *testing.T) {
	keys := []string{strconv.Quote("apiVersion"), strconv.Quote("kind")}
	for _, k := range configKeys() {
		keys = append(keys, strconv.Quote(k))
	}
	want := []string{"key in [" + strings.Join(keys, ", ") + "]", "there are " + strings.Join(configKeys(), ", ") + ";"}
	for _, k := range configKeys() {
		want = append(want, "!has(p."+k+") || ", "configuration for nvshare.com: "+k+" is ")
	}
	contains(t, "helm/nvshare/objects/dra-class/policy.yaml", want...)
	var rows []string
	for _, k := range configKeys() {
		rows = append(rows, "\n| `"+k+"` | ")
	}
	contains(t, "kubernetes/claims.md", rows...)
}

func contains(t *testing.T, file string, want ...string) {
	t.Helper()
	text, err := os.ReadFile("../../deployments/" + file)
	check(t, err)
	for _, w := range want {
		if !strings.Contains(string(text), w) {
			t.Errorf("deployments/%s lacks %q", file, w)
		}
	}
}
