#ifndef FULLSHARD_CORE_TENSOR_TREE_H_
#define FULLSHARD_CORE_TENSOR_TREE_H_

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"

// for_each_tensor(value, f) calls f(at::Tensor&) for every tensor inside
// tensors, optionals, pairs, tuples, vectors, arrays and maps, nested as they
// come. Any other value holds no tensors, unless its own namespace declares
//   template <class F> void for_each_tensor(MyStruct& value, F&& f);

namespace fullshard {

template <class F>
void for_each_tensor(at::Tensor& tensor, F&& f) {
  f(tensor);
}

template <class T, class F>
void for_each_tensor(std::optional<T>& value, F&& f);
template <class A, class B, class F>
void for_each_tensor(std::pair<A, B>& value, F&& f);
template <class... Ts, class F>
void for_each_tensor(std::tuple<Ts...>& value, F&& f);
template <class T, class F>
void for_each_tensor(std::vector<T>& value, F&& f);
template <class T, size_t N, class F>
void for_each_tensor(std::array<T, N>& value, F&& f);
template <class K, class V, class F>
void for_each_tensor(std::map<K, V>& value, F&& f);
template <class K, class V, class F>
void for_each_tensor(std::unordered_map<K, V>& value, F&& f);

namespace internal {

using ::fullshard::for_each_tensor;

template <class T, class F, class = void>
struct HoldsTensors : std::false_type {};
template <class T, class F>
struct HoldsTensors<T, F,
                    std::void_t<decltype(for_each_tensor(std::declval<T&>(),
                                                         std::declval<F&>()))>>
    : std::true_type {};

template <class T, class F>
void visit_tensors(T& value, F& f) {
  if constexpr (HoldsTensors<T, F>::value) for_each_tensor(value, f);
}

}  // namespace internal

template <class T, class F>
void for_each_tensor(std::optional<T>& value, F&& f) {
  if (value.has_value()) internal::visit_tensors(*value, f);
}
template <class A, class B, class F>
void for_each_tensor(std::pair<A, B>& value, F&& f) {
  internal::visit_tensors(value.first, f);
  internal::visit_tensors(value.second, f);
}
template <class... Ts, class F>
void for_each_tensor(std::tuple<Ts...>& value, F&& f) {
  std::apply([&](auto&... e) { (internal::visit_tensors(e, f), ...); }, value);
}
template <class T, class F>
void for_each_tensor(std::vector<T>& value, F&& f) {
  if constexpr (!std::is_same_v<T, bool>) {
    for (T& e : value) internal::visit_tensors(e, f);
  }
}
template <class T, size_t N, class F>
void for_each_tensor(std::array<T, N>& value, F&& f) {
  for (T& e : value) internal::visit_tensors(e, f);
}
template <class K, class V, class F>
void for_each_tensor(std::map<K, V>& value, F&& f) {
  for (auto& entry : value) internal::visit_tensors(entry.second, f);
}
template <class K, class V, class F>
void for_each_tensor(std::unordered_map<K, V>& value, F&& f) {
  for (auto& entry : value) internal::visit_tensors(entry.second, f);
}

}  // namespace fullshard

#endif  // FULLSHARD_CORE_TENSOR_TREE_H_
