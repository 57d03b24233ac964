// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The numbers and layouts are those of hook/rm/rm_abi.h, which names the published source of each.
func TestABIIsThatOfTheShim(t *testing.T) {
	abi := &abis[0]
	same := map[string]uint64{
		"RM_ALLOC": uint64(abi.Alloc), "RM_CONTROL": uint64(abi.Control),
		"RM_SET_SLICE": uint64(abi.SetSlice.Number), "sizeof(struct rm_slice)": uint64(abi.SetSlice.Size),
		"RM_GET_SLICE": uint64(abi.GetSlice.Number),
		"RM_CHANNELS":  uint64(abi.Channels.Number), "sizeof(struct rm_channels)": uint64(abi.Channels.Size),
		"RM_CHANNELS_MAX": maxChannels, "offsetof(struct rm_channels, disable)": disableAt,
		"offsetof(struct rm_channels, count)":  countAt,
		"offsetof(struct rm_channels, client)": clientsAt, "offsetof(struct rm_channels, channel)": channelsAt,
		"RM_GET_UUID": uint64(abi.UUID.Number), "sizeof(struct rm_uuid)": uint64(abi.UUID.Size),
		"offsetof(struct rm_uuid, flags)":  uuidFlagsAt,
		"offsetof(struct rm_uuid, length)": uuidLengthAt, "offsetof(struct rm_uuid, data)": uuidAt,
		"RM_UUID_BINARY": uuidBinary, "RM_NO_OBJECT": uint64(abi.NoObject[0]), "RM_BAD_HANDLE": uint64(abi.NoObject[1]),
	}
	var text strings.Builder
	text.WriteString("#include \"rm_abi.h\"\n")
	for name, n := range same {
		fmt.Fprintf(&text, "_Static_assert((uint64_t)(%s) == %dull, \"%s\");\n", name, n, strings.ReplaceAll(name, "\"", ""))
	}
	file := filepath.Join(t.TempDir(), "abi.c")
	if err := os.WriteFile(file, []byte(text.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-std=gnu11", "-iquote", "../../../hook/rm", "-fsyntax-only", file).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestUnknownDriverIsRefused(t *testing.T) {
	for version, known := range map[string]bool{"580.159.04": true, "515.43.04": true, "595.10": true, "600.1": false, "470.2": false, "": false, "x": false} {
		if _, err := For(version); (err == nil) != known {
			t.Errorf("driver %q: %v", version, err)
		}
	}
}
