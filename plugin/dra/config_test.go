// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// The admission policies, by kustomize and by Helm, know the keys that the driver knows.
func TestPolicyKnowsEveryKey(t *testing.T) {
	keys := []string{strconv.Quote("apiVersion"), strconv.Quote("kind")}
	for _, k := range configKeys() {
		keys = append(keys, strconv.Quote(k))
	}
	want := "key in [" + strings.Join(keys, ", ") + "]"
	for _, file := range []string{"kubernetes/overlays/dra/policy.yaml", "helm/nvshare/templates/dra.yaml"} {
		text, err := os.ReadFile("../../deployments/" + file)
		check(t, err)
		if !strings.Contains(string(text), want) {
			t.Errorf("%s lacks %s", file, want)
		}
	}
}
