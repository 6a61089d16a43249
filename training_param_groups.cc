#include "fullshard/training_param_groups.h"

#include <utility>
#include <variant>

#include "fullshard/io/pickle_writer.h"
#include "fullshard/optim/optimizer_state.h"

namespace fullshard::internal {
namespace {

std::string pickle_of(const OptimizerOption& option) {
  PickleWriter pickle;
  if (const auto* flag = std::get_if<bool>(&option)) {
    pickle.boolean(*flag);
  } else if (const auto* number = std::get_if<double>(&option)) {
    pickle.number(*number);
  } else if (const auto* pair =
                 std::get_if<std::pair<double, double>>(&option)) {
    pickle.begin_tuple();
    pickle.number(pair->first);
    pickle.number(pair->second);
    pickle.end_tuple();
  } else {
    pickle.none();
  }
  return pickle.finish();
}

std::string pickle_of(const std::vector<std::string>& names) {
  PickleWriter pickle;
  pickle.begin_list();
  for (const std::string& name : names) pickle.string(name);
  pickle.end_list();
  return pickle.finish();
}

}  // namespace

std::vector<ObjectToSave> param_groups_to_save(
    const ShardedOptimizer& optimizer, const std::string& optimizer_key) {
  std::vector<ObjectToSave> objects;
  int64_t place = 0;
  for (const FullOptimizerState::Group& group :
       optimizer_param_groups(optimizer)) {
    const auto add = [&](const std::string& key, std::string pickle) {
      objects.push_back(
          {{optimizer_key, "param_groups", place, key}, std::move(pickle)});
    };
    add("params", pickle_of(group.params));
    for (const auto& [key, option] : group.options) add(key, pickle_of(option));
    ++place;
  }
  return objects;
}

}  // namespace fullshard::internal
