// SPDX-License-Identifier: Apache-2.0
//
// Usage: node typed.mjs DASHBOARD.json
// Prints the dashboard as TypeScript whose types are those that Grafana publishes of its
// dashboards and panels. What the compiler finds in it, Grafana does not understand.
import { readFileSync } from 'node:fs';

const { panels, ...rest } = JSON.parse(readFileSync(process.argv[2], 'utf8'));
const raw = '@grafana/schema/dist/types/raw';
const print = (name, type, value) => console.log(`export const ${name}: ${type} = ${JSON.stringify(value, null, 1)};`);
const module = (path) => `'./node_modules/${raw}/${path}/x/types.gen'`;

console.log(`import type * as raw from ${module('dashboard')};
// JSON has the values of enumerations, and panels have defaults for their own options.
type Plain<T> = T extends string ? \`\${T}\` : T extends (infer E)[] ? Plain<E>[] : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
type Part<T> = T extends (infer E)[] ? Part<E>[] : T extends object ? { [K in keyof T]?: Part<T[K]> } : T;
type Query = { refId: string; expr: string; legendFormat?: string; format?: 'time_series' | 'table' | 'heatmap'; instant?: boolean; range?: boolean };
type Panel<Options, Custom> = Plain<Omit<raw.Panel, 'options' | 'fieldConfig' | 'targets'>> & {
  options: Part<Plain<Options>>;
  fieldConfig: { defaults: Plain<Omit<raw.FieldConfig, 'custom'>> & { custom?: Part<Plain<Custom>> }; overrides: Plain<raw.FieldConfigSource>['overrides'] };
  targets: Query[];
};`);
print('dashboard', `Plain<Omit<raw.Dashboard, 'panels'>>`, rest);
const custom = ['table', 'timeseries']; // panels that publish a FieldConfig
panels.forEach((panel, i) => {
  if (panel.type === 'row') {
    print(`panel${i}`, 'Plain<raw.RowPanel>', panel);
    return;
  }
  console.log(`import type * as kind${i} from ${module(`composable/${panel.type}/panelcfg`)};`);
  print(`panel${i}`, `Panel<kind${i}.Options, ${custom.includes(panel.type) ? `kind${i}.FieldConfig` : '{}'}>`, panel);
});
