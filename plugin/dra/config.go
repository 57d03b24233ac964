// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	kjson "sigs.k8s.io/json"

	"github.com/nvshare/nvshare/sched/api"
)

// The opaque configuration of a class or a claim:
//
//	{"apiVersion": "nvshare.com/v1", "kind": "Share", "coreLimit": 60, "priority": "latency"}
//
// Each field of api.Fields is one key, with the values of the annotation. Core request
// and memory limit are capacities of the claim, and no keys; migratable is none.
const (
	ConfigVersion = "nvshare.com/v1"
	ConfigKind    = "Share"

	// byCapacity are the fields that the claim's capacities say.
	byCapacity = api.CoreRequestField | api.MemoryLimitField
	// notInClaims are those that no claim says: a claim gives the device nodes of its GPU.
	notInClaims = api.MigratableField
)

// words returns a name as JSON has it: "coreLimit" of "core-limit".
func words(name string) string {
	parts := strings.Split(name, "-")
	for i, p := range parts[1:] {
		parts[i+1] = strings.ToUpper(p[:1]) + p[1:]
	}
	return strings.Join(parts, "")
}

func configKeys() (keys []string) {
	for _, f := range api.Fields {
		if f.ID&(byCapacity|notInClaims) == 0 {
			keys = append(keys, words(f.Key))
		}
	}
	return keys
}

// parseConfig reads one opaque configuration.
func parseConfig(data []byte) (t api.Terms, err error) {
	var config map[string]any
	strict, err := kjson.UnmarshalStrict(data, &config)
	if err == nil && len(strict) > 0 {
		err = strict[0]
	}
	if err != nil {
		return t, fmt.Errorf("not a JSON object: %w", err)
	}
	if config["apiVersion"] != ConfigVersion || config["kind"] != ConfigKind {
		return t, fmt.Errorf("apiVersion %v, kind %v: give apiVersion %s, kind %s", config["apiVersion"], config["kind"], ConfigVersion, ConfigKind)
	}
	delete(config, "apiVersion")
	delete(config, "kind")
	for _, f := range api.Fields {
		key := words(f.Key)
		value, ok := config[key]
		if !ok || f.ID&notInClaims != 0 {
			continue
		}
		if f.ID&byCapacity != 0 {
			return api.Terms{}, fmt.Errorf("%s: request it as a capacity of the device: cores, memory", key)
		}
		delete(config, key)
		text, err := plain(value)
		if err == nil {
			err = f.Parse(&t, text)
		}
		if err != nil {
			return api.Terms{}, fmt.Errorf("%s: %w", key, err)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(config)) {
		return api.Terms{}, fmt.Errorf("unknown field %.64q: there are %s", key, strings.Join(configKeys(), ", "))
	}
	return t, nil
}

// plain writes a value of JSON as the annotation would have it.
func plain(value any) (string, error) {
	switch v := value.(type) {
	case string:
		return v, nil
	case int64, float64, bool, json.Number:
		return fmt.Sprint(v), nil
	}
	return "", fmt.Errorf("a text or a number is wanted, not %T", value)
}

// configured returns what the configurations of an allocation say for a request. What
// the class says goes before what the claim says, because the class is the
// administrator's.
func configured(all []resourceapi.DeviceAllocationConfiguration, request string) (t api.Terms, err error) {
	parent, _, _ := strings.Cut(request, "/") // of a subrequest
	for _, source := range []resourceapi.AllocationConfigSource{resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim} {
		var said api.Terms
		for _, c := range all {
			if c.Source != source || c.Opaque == nil || c.Opaque.Driver != DriverName {
				continue
			}
			if len(c.Requests) > 0 && !slices.Contains(c.Requests, request) && !slices.Contains(c.Requests, parent) {
				continue
			}
			more, err := parseConfig(c.Opaque.Parameters.Raw)
			if err != nil {
				return t, fmt.Errorf("configuration of the %s for request %q: %w", strings.TrimPrefix(string(source), "From"), request, err)
			}
			said = more.Or(said)
		}
		t = t.Or(said)
	}
	return t, nil
}
