// SPDX-License-Identifier: Apache-2.0

// Package uplot has uPlot 1.6.32 as released (MIT licence), for pages that are one file.
package uplot

import _ "embed"

// Script defines uPlot, which draws charts.
//
//go:embed uPlot.iife.min.js
var Script string

// Style is its stylesheet.
//
//go:embed uPlot.min.css
var Style string
