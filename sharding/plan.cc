#include "fullshard/sharding/plan.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "fullshard/sharding/shard_layout.h"

namespace fullshard {
namespace {

int64_t size_of(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// As flat parameters do, counts a complex element as two real ones.
int64_t real_numel(const PlanParameter& parameter) {
  return parameter.numel * (c10::isComplexType(parameter.dtype) ? 2 : 1);
}

bool reshards_after_forward(const PlanUnit& unit, const PlanOptions& options) {
  return unit.reshard_after_forward.value_or(
      options.strategy == ShardingStrategy::kFullShard ||
      options.strategy == ShardingStrategy::kHybridShard);
}

// Adds a flat parameter: those of a unit that agree in trainability, storage
// dtype and compute dtype.
void add_flat(const std::vector<int64_t>& numels, bool trainable,
              at::ScalarType storage, at::ScalarType compute,
              at::ScalarType reduced, const PlanOptions& options,
              int num_shards, Plan::Row& row) {
  const ShardLayout layout =
      ShardLayout::compute(numels, size_of(compute), num_shards);
  int64_t numel = 0;
  for (int64_t n : numels) numel += n;
  row.numel += numel;
  row.padding_numel += layout.padded() - numel;
  row.unsharded_bytes += layout.padded() * size_of(compute);
  row.storage_bytes += layout.padded() * size_of(storage);
  row.sharded_bytes += layout.chunk * size_of(storage);
  if (!trainable) return;
  row.trainable_bytes += layout.chunk * size_of(storage);
  const int64_t gradient = options.keep_low_precision_grads
                               ? std::min(size_of(reduced), size_of(storage))
                               : size_of(storage);
  row.gradient_bytes += layout.chunk * gradient;
  row.autograd_bytes +=
      layout.padded() * size_of(compute) + layout.chunk * size_of(reduced);
  row.reduce_bytes += layout.padded() * size_of(reduced);
}

Plan::Row plan_unit(const PlanUnit& unit, const PlanOptions& options,
                    int num_shards) {
  using Key = std::tuple<bool, at::ScalarType, at::ScalarType>;
  std::map<Key, std::vector<int64_t>> flats;
  Plan::Row row;
  row.unit = unit.name;
  row.num_parameters = static_cast<int64_t>(unit.parameters.size());
  for (const PlanParameter& parameter : unit.parameters) {
    const at::ScalarType storage = c10::toRealValueType(parameter.dtype);
    const bool cast =
        options.param_dtype.has_value() && c10::isFloatingType(parameter.dtype);
    const at::ScalarType compute =
        parameter.compute_dtype.value_or(cast ? *options.param_dtype : storage);
    flats[{parameter.trainable, storage, compute}].push_back(
        real_numel(parameter));
  }
  for (const auto& [key, numels] : flats) {
    const auto& [trainable, storage, compute] = key;
    const at::ScalarType reduced = unit.reduce_dtype.value_or(
        options.reduce_dtype.value_or(options.param_dtype.value_or(storage)));
    add_flat(numels, trainable, storage, compute, reduced, options, num_shards,
             row);
  }
  return row;
}

void add_collectives(const std::vector<PlanUnit>& units,
                     const PlanOptions& options, int num_shards, Plan& plan) {
  const bool replicated = options.strategy == ShardingStrategy::kNoShard
                              ? options.num_shards * options.num_replicas > 1
                              : options.num_replicas > 1;
  size_t last = units.size();
  for (size_t i = 0; i < units.size(); ++i) {
    if (!units[i].encloses_others) last = i;
  }
  bool something_trains = false;
  for (size_t i = 0; i < units.size(); ++i) {
    Plan::Row& row = plan.rows[i];
    const bool trains = row.gradient_bytes > 0;
    something_trains = something_trains || trains;
    if (num_shards > 1) {
      row.gathers_forward = 1;
      // The last block and what encloses others stay from forward.
      const bool stays = units[i].encloses_others || i == last ||
                         !reshards_after_forward(units[i], options);
      row.gathers_backward = stays || !something_trains ? 0 : 1;
      row.reduce_scatters = trains ? 1 : 0;
    }
    row.all_reduces = trains && replicated ? 1 : 0;
  }
}

void add(const Plan::Row& row, Plan::Row& total) {
  total.num_parameters += row.num_parameters;
  total.numel += row.numel;
  total.padding_numel += row.padding_numel;
  total.unsharded_bytes += row.unsharded_bytes;
  total.sharded_bytes += row.sharded_bytes;
  total.gradient_bytes += row.gradient_bytes;
  total.reduce_bytes += row.reduce_bytes;
  total.storage_bytes += row.storage_bytes;
  total.trainable_bytes += row.trainable_bytes;
  total.autograd_bytes += row.autograd_bytes;
  total.gathers_forward += row.gathers_forward;
  total.gathers_backward += row.gathers_backward;
  total.reduce_scatters += row.reduce_scatters;
  total.all_reduces += row.all_reduces;
}

void add_memory(const std::vector<PlanUnit>& units, const PlanOptions& options,
                int num_shards, Plan& plan) {
  int64_t largest = 0, enclosing = 0, staying = 0, largest_stored = 0,
          largest_reduced = 0, largest_autograd = 0;
  int64_t gathered = 0, reduced = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    const Plan::Row& row = plan.rows[i];
    largest_stored = std::max(largest_stored, row.storage_bytes);
    largest_reduced = std::max(largest_reduced, row.reduce_bytes);
    largest_autograd = std::max(largest_autograd, row.autograd_bytes);
    if (units[i].encloses_others) {
      enclosing += row.unsharded_bytes;
    } else if (!reshards_after_forward(units[i], options)) {
      staying += row.unsharded_bytes;
    } else {
      largest = std::max(largest, row.unsharded_bytes);
    }
    gathered +=
        row.unsharded_bytes * (row.gathers_forward + row.gathers_backward);
    reduced += row.reduce_bytes * row.reduce_scatters;
  }
  const Plan::Row& total = plan.total;
  // Units that stay from forward to backward have slots of their own.
  const int64_t slots = staying + 2 * largest + enclosing;
  const int64_t optimizer = options.optimizer_states * total.trainable_bytes;
  plan.init_bytes = total.sharded_bytes + largest_stored;
  plan.forward_bytes = total.sharded_bytes + slots;
  plan.backward_bytes =
      plan.forward_bytes + total.gradient_bytes + 2 * largest_reduced;
  plan.step_bytes = total.sharded_bytes + total.gradient_bytes + optimizer;
  plan.peak_bytes = plan.backward_bytes + largest_autograd + optimizer;
  plan.traffic_bytes = (gathered + reduced) / num_shards * (num_shards - 1);
}

// --- the table

// "layers.12.mlp" without and with its last number.
struct Numbered {
  std::string before, after;
  int64_t number = -1;
};

Numbered split_number(const std::string& name) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  size_t end = name.size();
  while (end > 0 && !is_digit(name[end - 1])) --end;
  size_t begin = end;
  while (begin > 0 && is_digit(name[begin - 1])) --begin;
  if (begin == end || end - begin > 9) return {name, "", -1};
  return {name.substr(0, begin), name.substr(end),
          std::stoll(name.substr(begin, end - begin))};
}

bool alike(const Plan::Row& a, const Plan::Row& b) {
  return a.num_parameters == b.num_parameters && a.numel == b.numel &&
         a.padding_numel == b.padding_numel &&
         a.unsharded_bytes == b.unsharded_bytes &&
         a.sharded_bytes == b.sharded_bytes &&
         a.gathers_forward == b.gathers_forward &&
         a.gathers_backward == b.gathers_backward &&
         a.reduce_scatters == b.reduce_scatters &&
         a.all_reduces == b.all_reduces;
}

bool follows(const Plan::Row& a, const Plan::Row& b) {
  const Numbered first = split_number(a.unit), second = split_number(b.unit);
  return first.number >= 0 && second.number == first.number + 1 &&
         first.before == second.before && first.after == second.after &&
         alike(a, b);
}

std::string line(const std::string& unit, size_t width, const Plan::Row& row) {
  return absl::StrFormat(
      "%-*s %6d %14d %8d %10s %10s %3d+%d %3d\n", static_cast<int>(width), unit,
      row.num_parameters, row.numel, row.padding_numel,
      bytes_for_people(row.unsharded_bytes),
      bytes_for_people(row.sharded_bytes), row.gathers_forward,
      row.gathers_backward, row.reduce_scatters + row.all_reduces);
}

}  // namespace

std::string bytes_for_people(int64_t num_bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(num_bytes);
  size_t unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrCat(num_bytes, " B")
                   : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

Plan make_plan(const std::vector<PlanUnit>& units, const PlanOptions& options) {
  Plan plan;
  plan.num_shards = options.num_shards;
  plan.num_replicas = options.num_replicas;
  const int num_shards =
      options.strategy == ShardingStrategy::kNoShard ? 1 : options.num_shards;
  for (const PlanUnit& unit : units) {
    plan.rows.push_back(plan_unit(unit, options, num_shards));
  }
  add_collectives(units, options, num_shards, plan);
  plan.total.unit = "total";
  for (const Plan::Row& row : plan.rows) add(row, plan.total);
  add_memory(units, options, num_shards, plan);
  return plan;
}

std::string Plan::table() const {
  std::vector<std::pair<std::string, size_t>> lines;  // With the row.
  size_t width = 16;
  for (size_t i = 0; i < rows.size();) {
    size_t last = i;
    while (last + 1 < rows.size() && follows(rows[last], rows[last + 1])) {
      ++last;
    }
    std::string name = rows[i].unit;
    if (last > i) {
      absl::StrAppend(&name, " ..", split_number(rows[last].unit).number, " (",
                      last - i + 1, " of)");
    }
    width = std::max(width, name.size());
    lines.emplace_back(std::move(name), i);
    i = last + 1;
  }
  const int ranks = num_shards * num_replicas;
  std::string text =
      absl::StrFormat("%d rank%s: shard groups of %d, %d replica%s\n\n", ranks,
                      ranks == 1 ? "" : "s", num_shards, num_replicas,
                      num_replicas == 1 ? "" : "s");
  absl::StrAppendFormat(&text, "%-*s %6s %14s %8s %10s %10s %5s %3s\n",
                        static_cast<int>(width), "unit", "params", "elements",
                        "padding", "unsharded", "per rank", "gath.", "red.");
  for (const auto& [name, row] : lines) text += line(name, width, rows[row]);
  text += line("total", width, total);
  absl::StrAppendFormat(
      &text,
      "\nmemory of a rank, without activations:\n"
      "  after init      %10s\n"
      "  forward         %10s\n"
      "  backward        %10s\n"
      "  after the step  %10s\n"
      "  peak            %10s\n"
      "traffic of a rank in a step: %s each way\n",
      bytes_for_people(init_bytes), bytes_for_people(forward_bytes),
      bytes_for_people(backward_bytes), bytes_for_people(step_bytes),
      bytes_for_people(peak_bytes), bytes_for_people(traffic_bytes));
  return text;
}

}  // namespace fullshard
