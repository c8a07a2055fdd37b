/** The views of the page, in the order of their tabs. Keys 1 to 9 and 0 open them. */

import { overviewView } from "./overview.js";
import { membersView } from "./members.js";
import { curvesView } from "./curves.js";
import { timelineView } from "./timeline.js";
import { placementView } from "./placement.js";
import { pipelineView } from "./pipeline.js";
import { searchView } from "./search.js";
import { ensembleView } from "./ensemble.js";
import { samplesView } from "./samples.js";
import { costView } from "./cost.js";
import { noticesView } from "./notices.js";
import { memberView } from "./member.js";
import { runsView } from "./runs.js";
import { compareView } from "./compare.js";

export const VIEWS = [
  overviewView, membersView, curvesView, timelineView, placementView, pipelineView, searchView,
  ensembleView, samplesView, costView, noticesView, memberView, runsView, compareView,
];
