/** The views of the page, in the order of their tabs. Keys 1 to 9 and 0 open them. */

import { overviewView } from "./overview.js";
import { membersView } from "./members.js";
import { curvesView } from "./curves.js";
import { placementView } from "./placement.js";
import { searchView } from "./search.js";
import { ensembleView } from "./ensemble.js";
import { costView } from "./cost.js";
import { noticesView } from "./notices.js";
import { memberView } from "./member.js";
import { runsView } from "./runs.js";
import { compareView } from "./compare.js";

export const VIEWS = [
  overviewView, membersView, curvesView, placementView, searchView, ensembleView, costView, noticesView, memberView, runsView, compareView,
];
