// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
	"github.com/sirupsen/logrus/hooks/test"
)

// A refusal names nobody of another namespace, and no label of it: whoever may create a pod may read
// it. The plugin's log has the names.
func TestRefusalsNameNoOtherNamespace(t *testing.T) {
	log := logrus.New()
	log.SetOutput(t.Output())
	lines := test.NewLocal(log)
	p := newPlacing(t, 2)
	p.log, p.containers.log = log, log
	create := func(namespace, name string, annotations ...string) error {
		t.Helper()
		lines.Reset()
		pod, ctr := podOf(name, "id-"+name, says(annotations...))
		pod.Namespace = namespace
		_, _, err := p.CreateContainer(t.Context(), pod, ctr)
		return err
	}
	refused := func(want string, annotations ...string) {
		t.Helper()
		err := create("web", "new", annotations...)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "ml/") || strings.Contains(err.Error(), "user 7") {
			t.Errorf("%v\nwant %q, and no name of another namespace", err, want)
		}
		for _, e := range lines.AllEntries() {
			if strings.Contains(e.Message, "ml/secret-a/main") {
				return
			}
		}
		t.Errorf("the log does not say who is in the way: %v", lines.AllEntries())
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(create("ml", "secret-a", "gpu=nvshare.com/gpu=0", "gpu-core-request=30", "gpu-memory-limit=1Gi"))
	check(create("ml", "secret-b", "gpu=nvshare.com/gpu=0", "gpu-core-request=25"))
	check(create("web", "own", "gpu=nvshare.com/gpu=0", "gpu-core-request=10", "gpu-memory-limit=2Gi"))
	check(create("ml", "secret-c", "gpu=nvshare.com/gpu=1", "gpu-core-request=60"))
	refused("has 35 % and 13Gi of 16Gi left (web/own/main has 10 % and 2Gi, 2 tenants outside the namespace have 55 % and 1Gi): too little time", "gpu=1", "gpu-core-request=90")
	refused("40 % cannot be promised: GPU 0 ("+gpuID(0)+") has 35 % and 13Gi of 16Gi left (web/own/main has 10 % and 2Gi, 2 tenants outside the namespace have 55 % and 1Gi): too little time", "gpu=nvshare.com/gpu=0", "gpu-core-request=40")
	refused(`a tenant outside the namespace is there without exclusion label "web/x"`, "gpu=1", "gpu-exclusion=x")

	p = newPlacing(t, 1)
	p.log, p.containers.log = log, log
	check(create("ml", "secret-a", "gpu=nvshare.com/gpu=0", "gpu-exclusion=secret"))
	refused("it is only for an exclusion label of another namespace", "gpu=1")
	p.containers.promises = []Promise{{Who: "user 7", UUID: gpuID(0), Percent: 20}}
	refused("80 % and 16Gi of 16Gi left (1 tenant outside the namespace has 20 %): too little time", "gpu=1", "gpu-core-request=90")
}
