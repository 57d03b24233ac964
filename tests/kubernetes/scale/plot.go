// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/nvshare/nvshare/tests/plot"
)

// drawResults draws the runs into scale.svg in a directory.
func drawResults(dir string, all []result) error {
	all = slices.Clone(all)
	var profiles []string
	largest := map[string]string{} // by profile: base name of the run with most nodes
	most := map[string]int{}
	for i := range all {
		r := &all[i]
		if r.GOGC != "" {
			r.Profile += ", GOGC=" + r.GOGC
		}
		if !slices.Contains(profiles, r.Profile) {
			profiles = append(profiles, r.Profile)
		}
		if r.Nodes > most[r.Profile] {
			most[r.Profile], largest[r.Profile] = r.Nodes, r.file
		}
	}
	cost := plot.Panel{Title: "What a pod costs kube-scheduler", X: "nodes", Y: "ms"}
	packed := plot.Panel{Title: "GPUs in use / as few as can be", X: "nodes", Y: "times", Level: 1, LevelName: "bound of bin packing"}
	when := plot.Panel{Title: "Pods that are bound, in the largest cluster", X: "s", Y: "pods"}
	for _, profile := range profiles {
		c, p := plot.Series{Name: profile}, plot.Series{Name: profile}
		for _, r := range all {
			if r.Profile == profile {
				c.Points = append(c.Points, plot.Point{X: float64(r.Nodes), Y: r.PerPod})
				p.Points = append(p.Points, plot.Point{X: float64(r.Nodes), Y: float64(r.Audit.Devices) / float64(r.Bound)})
			}
		}
		if len(c.Points) == 0 {
			continue
		}
		cost.Lines, packed.Lines = append(cost.Lines, c), append(packed.Lines, p)
		w, err := bindings(largest[profile] + ".csv")
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		when.Lines = append(when.Lines, plot.Series{Name: profile, Points: w})
	}
	return os.WriteFile(filepath.Join(dir, "scale.svg"), []byte(plot.SVG(when, cost, packed)), 0o644)
}

// bindings returns how many pods were bound at which time.
func bindings(file string) (points []plot.Point, err error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var at []float64
	for _, r := range rows[1:] {
		ms, err := strconv.ParseFloat(r[4], 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		at = append(at, ms/1000)
	}
	slices.Sort(at)
	for i := 0; i < len(at); i += max(1, len(at)/200) {
		points = append(points, plot.Point{X: at[i], Y: float64(i + 1)})
	}
	return points, nil
}
