// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Version of the programs; the Makefile sets it when it links them.
var Version = "dev"

// RunDirEnv names the run directory.
const RunDirEnv = "NVSHARE_RUN_DIR"

// RunDir returns the run directory that is used where no flag says otherwise:
// $NVSHARE_RUN_DIR, or /var/run/nvshare.
func RunDir() string {
	if dir := os.Getenv(RunDirEnv); dir != "" {
		return dir
	}
	return "/var/run/nvshare"
}

// WardenDir returns the directory of nvshare-warden where no flag says otherwise:
// $NVSHARE_WARDEN_DIR, or /var/run/nvshare-warden. It is not in the run directory, which is
// the scheduler's: the warden has more rights.
func WardenDir() string {
	if dir := os.Getenv("NVSHARE_WARDEN_DIR"); dir != "" {
		return dir
	}
	return DefaultWardenDir
}

// DefaultWardenDir is where the unit of systemd has it.
const DefaultWardenDir = "/var/run/nvshare-warden"

// WardenSocket is the name of the warden's socket there.
const WardenSocket = "warden.sock"

// ParseDuration reads a positive duration as people give it to the programs:
// a number of seconds ("45", "0.5"), or with a unit ("200ms", "1m30s").
func ParseDuration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		seconds, numErr := strconv.ParseFloat(s, 64)
		if numErr != nil || !(seconds < 1e9 && seconds > -1e9) {
			return 0, fmt.Errorf("%q is not a duration: give seconds (45) or a unit (200ms)", s)
		}
		d = time.Duration(seconds * float64(time.Second))
	}
	if d <= 0 {
		return 0, fmt.Errorf("%q is not positive: give a time above 0", s)
	}
	return d, nil
}

// ParseAntiThrash reads a mode as people give it: with "on" one client at a time uses a
// GPU, with "off" all at once; with "auto" the scheduler chooses one of the two.
func ParseAntiThrash(s string) (Mode, error) {
	switch s {
	case "on":
		return Mode_MODE_EXCLUSIVE, nil
	case "off":
		return Mode_MODE_CONCURRENT, nil
	case "auto":
		return Mode_MODE_AUTO, nil
	}
	return Mode_MODE_UNSPECIFIED, fmt.Errorf("%q is neither on nor off nor auto: give one of them", s)
}

// AntiThrash is the inverse of ParseAntiThrash.
func AntiThrash(m Mode) string {
	switch m {
	case Mode_MODE_CONCURRENT:
		return "off"
	case Mode_MODE_AUTO:
		return "auto"
	}
	return "on"
}

// BySlices begins the reason of a way where that is time slices.
const BySlices = "by time slices: "

// Unused says whether no process is on a GPU: then nobody's work is the reason for a way.
func Unused(g *GPU) bool { return len(g.Clients) == 0 && g.Others.GetClients() == 0 }

// Sharing says how tenants share a GPU, and where the scheduler chose, why; in turns also why no tenants
// have theirs together.
func Sharing(g *GPU) string {
	how, reason := fmt.Sprintf("turns of %v", time.Duration(g.QuantumNs)), strings.TrimPrefix(g.WayReason, BySlices)
	switch g.Way {
	case "driver":
		how = "all at the same time"
	case "slices":
		how = "shared by time slices"
	}
	for _, r := range g.Refused {
		if r.Way == "cohort" && r.Code != g.WayCode {
			reason += "; no tenants have their turn together: " + r.Reason
		}
	}
	switch {
	case g.Mode == Mode_MODE_AUTO && Unused(g):
		reason = "auto: nobody uses it now"
	case g.Mode == Mode_MODE_AUTO:
		reason = strings.TrimSuffix("auto: "+reason, ": ")
	case g.Mode == g.EffectiveMode || reason == "":
		return how
	}
	return how + " (" + reason + ")"
}

// Who names a client for people: its Kubernetes names, or its container, or
// its command.
func Who(c *Client) string {
	if ct := c.GetContainer(); ct.GetName() != "" || ct.GetPod() != "" || ct.GetId() != "" {
		return Tenant(ct, 0)
	}
	return c.GetCommand()
}

// Tenant names a container for people, or the user of processes outside
// containers.
func Tenant(c *Container, uid uint32) string {
	switch {
	case c.GetPod() != "":
		return c.Namespace + "/" + c.Pod + "/" + c.Name
	case c.GetName() != "":
		return c.Name
	case c.GetId() != "":
		return fmt.Sprintf("container %.12s", c.Id)
	}
	return fmt.Sprintf("user %d", uid)
}

// NamesOf returns the names by which people may mean a container, beside its id: as
// Tenant writes the container, its own name, and its pod with and without the namespace.
func NamesOf(c *Container) []string {
	names := []string{Tenant(c, 0)}
	if c.GetName() != "" {
		names = append(names, c.Name)
	}
	if c.GetPod() != "" {
		names = append(names, c.Pod, c.Namespace+"/"+c.Pod)
	}
	return names
}

// Meant returns the ids of those of these containers, by id, that people may mean by a name:
// that with this id, else those with this name, else those whose id begins so. named: it is not
// only the beginning of an id.
func Meant(want string, containers map[string]*Container) (ids []string, named bool) {
	if containers[want] != nil {
		return []string{want}, true
	}
	var begin []string
	for id, c := range containers {
		switch {
		case slices.Contains(NamesOf(c), want):
			ids = append(ids, id)
		case strings.HasPrefix(id, want):
			begin = append(begin, id)
		}
	}
	if named = len(ids) > 0; !named {
		ids = begin
	}
	slices.Sort(ids)
	return ids, named
}

// CodeOf returns the code of a problem of a status, by its place in the list.
func CodeOf(r *StatusResponse, problem int) ProblemCode {
	if problem >= len(r.ProblemCodes) {
		return ProblemCode_PROBLEM_CODE_UNSPECIFIED
	}
	return r.ProblemCodes[problem]
}

// remedies say what to do about a problem.
var remedies = map[ProblemCode]string{
	ProblemCode_PROBLEM_CODE_BUG:          "report it with the file of nvsharectl doctor bundle",
	ProblemCode_PROBLEM_CODE_NO_GRANTS:    "make room on the disk of the run directory",
	ProblemCode_PROBLEM_CODE_SUSPEND_DIR:  "make room in the directory of --suspend-dir",
	ProblemCode_PROBLEM_CODE_HOST_MEMORY:  "free memory of the host, raise --swap-memory, or end tenants",
	ProblemCode_PROBLEM_CODE_PLUGIN:       "nvsharectl doctor",
	ProblemCode_PROBLEM_CODE_IDENTIFY:     "nvsharectl doctor",
	ProblemCode_PROBLEM_CODE_NO_GPU:       "nvidia-smi",
	ProblemCode_PROBLEM_CODE_FENCED:       "end the process, run nvshare-warden, which keeps it off the GPU, or run the scheduler with --fence-action kill",
	ProblemCode_PROBLEM_CODE_BYPASS:       "NVSHARE_DEBUG=1 in the program's environment names the entry points",
	ProblemCode_PROBLEM_CODE_OVERPROMISED: "nvsharectl set --list",
	ProblemCode_PROBLEM_CODE_MEMORY_LIMIT: "nvsharectl set --list",
	ProblemCode_PROBLEM_CODE_UNMANAGED:    "end the process, or start it with a GPU of nvshare",
	ProblemCode_PROBLEM_CODE_OUTSIDE:      "end the process",
	ProblemCode_PROBLEM_CODE_UNKNOWN_GPU:  "see that nvidia-smi -L lists the GPU, then start the process again",
}

// Remedy returns the command that shows or mends a problem, or what to do.
func Remedy(code ProblemCode) string {
	if r := remedies[code]; r != "" {
		return r
	}
	return "nvsharectl events"
}

// Misspelt returns which of names somebody has meant who wrote word, "" if none is like it: one
// of which it is the beginning, or else that differs in two letters at most.
func Misspelt(word string, names []string) string {
	meant, least := "", 3
	for _, name := range names {
		switch d := distance(word, name); {
		case len(word) > 2 && strings.HasPrefix(name, word):
			return name
		case d < least:
			meant, least = name, d
		}
	}
	return meant
}

// distance is how many letters have to be put in, removed or replaced to make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
